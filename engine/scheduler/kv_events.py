"""Record which blocks the prefix cache stores and removes, for external routers, as the same events as vLLM's.

A batch is an array [time, events, engine]; an event is a map whose `type` is the name of its class.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import msgspec

from serve_llm.engine.scheduler.block_pool import BlockKey
from serve_llm.engine.scheduler.sequence import KVCacheSpec, Sequence

DEVICE = "GPU"  # vLLM's name for device memory; here also used on a CPU
HOST = "CPU"  # vLLM's name for host memory


class KVCacheEvent(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    """Hashes are the last 64 bits of the blocks' hashes."""


class BlockStored(KVCacheEvent):
    """Consecutive blocks of one sequence were cached. For host memory, their contents are not repeated."""

    block_hashes: list[int]
    parent_block_hash: int | None  # hash of the block before the first one; None at the start of a sequence
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None  # for each block: the adapter's name, and for the first the salt
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """The cache is empty."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float  # seconds since 1970
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEventRecorder:
    """Collects the events of a step."""

    def __init__(self, groups: Items[KVCacheSpec]) -> None:
        self._groups = groups
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = [AllBlocksCleared()]  # sent first

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Return the events since the last call."""
        events = self._events
        self._events = []
        return events

    def store(self, sequence: Sequence, index: int, numbers: range) -> None:
        """Record that blocks of one group of a sequence, by their numbers in its table, are on the device."""
        group = self._groups[index]
        size = group.block_size
        hashes = sequence.block_hashes(size, numbers.stop)
        name = None if sequence.request.adapter is None else sequence.request.adapter.name
        self._events.append(
            BlockStored(
                block_hashes=[_shorten(hashes[number]) for number in numbers],
                parent_block_hash=_shorten(hashes[numbers.start - 1]) if numbers.start else None,
                token_ids=sequence.token_ids[numbers.start * size : numbers.stop * size],
                block_size=size,
                lora_id=None,
                medium=DEVICE,
                lora_name=name,
                extra_keys=[_find_extra_keys(sequence, name, number) for number in numbers],
                group_idx=index,
                kv_cache_spec_kind="full_attention" if group.window is None else "sliding_window",
                kv_cache_spec_sliding_window=group.window,
            )
        )

    def remove(self, key: BlockKey) -> None:
        """Record that the block was removed from the device."""
        self._remove(key, DEVICE)

    def store_in_memory(self, key: BlockKey) -> None:
        index, block_hash = key
        size = self._groups[index].block_size
        self._events.append(BlockStored([_shorten(block_hash)], None, [], size, None, HOST, None, group_idx=index))

    def remove_from_memory(self, key: BlockKey) -> None:
        self._remove(key, HOST)

    def _remove(self, key: BlockKey, medium: str) -> None:
        """Record a removal; successive removals are merged into one event."""
        index, block_hash = key
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and (last.medium, last.group_idx) == (medium, index):
            last.block_hashes.append(_shorten(block_hash))
        else:
            self._events.append(BlockRemoved([_shorten(block_hash)], medium, index))


def _shorten(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def _find_extra_keys(sequence: Sequence, name: str | None, number: int) -> list[str] | None:
    keys = [] if name is None else [name]
    if number == 0 and sequence.request.cache_salt:
        keys.append(sequence.request.cache_salt)
    return keys or None
