"""KV cache blocks outside the device: which ones are in host memory, and which ones are in a store below it.

A block that is evicted from the device is copied to a slot of host memory, and from there to the store, a directory on
disk. A sequence that needs it again gets it back instead of recomputing it. This module decides; the ranks copy
(`BlockCopy`), and the store moves bytes in other threads.

All ranks have the same slots and make the same copies in the same order, before the tokens of the step are computed.
Therefore a slot's content follows from past decisions, and no rank has to report it. Only the store accesses slots at
other times: it reads a slot once the step that filled it has a result, and fills a slot that no step in flight uses.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from serve_llm.common.types import OffloadStats
from serve_llm.engine.scheduler.block_pool import BlockKey
from serve_llm.engine.scheduler.kv_events import KVEventRecorder
from serve_llm.engine.scheduler.output import BlockCopy

MAX_WRITES = 16  # slots being written to the store at a time, which cannot be reused until then
PROBE_INTERVAL = 32  # retry a read from the store after it was skipped this often for being slower

Slot = tuple[BlockKey, int]  # a block in host memory, and where


class FinishedTransfer(NamedTuple):
    """A finished transfer: the store has filled or written a slot."""

    key: BlockKey
    is_read: bool
    is_complete: bool  # whether the slot holds the block, or the store has it


class BlockStore(Protocol):
    """Stores blocks beyond host memory. Its transfers run in other threads; no method but `wait` blocks."""

    stats: OffloadStats

    @property
    def is_open(self) -> bool:
        """Whether it accepts blocks; it has none until then."""

    @property
    def read_seconds(self) -> float | None:
        """Measured seconds to read a block; None: unknown."""

    def has(self, key: BlockKey) -> bool:
        """Whether the store has this block. Reading it may still fail."""

    def start_read(self, key: BlockKey, slot: int) -> None:
        """Fill the slot."""

    def start_write(self, key: BlockKey, slot: int) -> None:
        """Store the slot's block, unless the store already has it."""

    def take_finished(self) -> list[FinishedTransfer]:
        """Return the transfers that have ended since the last call."""

    def wait(self, seconds: float) -> None:
        """Wait until a transfer has ended, up to `seconds`."""


class OffloadManager:
    """Owns the slots of host memory. Only the scheduler calls it."""

    def __init__(
        self,
        num_slots: int,
        block_bytes: int = 0,
        copy_seconds: float = 0.0,
        store: BlockStore | None = None,
        recorder: KVEventRecorder | None = None,
    ) -> None:
        """block_bytes: of all ranks, for the statistics. copy_seconds: time to copy a block to the device. recorder:
        receives the events of host memory."""
        self.num_slots = num_slots
        self.store = store
        self._recorder = recorder
        self.stats = OffloadStats()
        self.seconds_per_token: float | None = None  # time to compute a prompt token; set by the engine's loop
        self._block_bytes = block_bytes
        self._copy_seconds = copy_seconds
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[BlockKey, int] = OrderedDict()  # least recently used first
        self._reading: dict[BlockKey, int] = {}  # slots being filled by the store
        self._writing: set[BlockKey] = set()
        self._unwritten: OrderedDict[BlockKey, None] = OrderedDict()  # in slots that the store may be reading
        self._copies: list[BlockCopy] = []  # for the step being scheduled
        self._saved: list[Slot] = []  # the blocks saved by that step
        self._under_way: deque[list[Slot]] = deque()  # the same for the steps without a result
        self._num_taken = 0  # steps
        self._num_finished = 0
        self._last_step: dict[int, int] = {}  # slot -> number of the last step that copies to or from it
        self._saved_in: dict[int, int] = {}  # slot -> number of the last step that copies to it
        self._num_declined = 0

    # What is where

    def has(self, key: BlockKey) -> bool:
        """Whether a copy scheduled from now on finds the block in host memory."""
        return key in self._slots

    def is_in_reach(self, key: BlockKey) -> bool:
        """Whether the block is in host memory, or the store has it."""
        return key in self._slots or key in self._reading or (self.store is not None and self.store.has(key))

    def is_reading(self, keys: Iterable[BlockKey]) -> bool:
        """Whether the store is still reading any of the blocks."""
        return any(key in self._reading for key in keys)

    @property
    def num_unwritten(self) -> int:
        """Number of blocks that are still to be written to the store."""
        return len(self._unwritten) + len(self._writing)

    def wait_for_reads(self, seconds: float) -> None:
        """Wait until a block has been read, up to `seconds`, if any is being read."""
        if self._reading and self.store is not None:
            self.store.wait(seconds)

    # What is worth it

    def is_memory_faster(self, blocks_per_token: float) -> bool:
        """Whether copying blocks to the device takes less time than computing their tokens."""
        return self._is_faster(blocks_per_token * self._copy_seconds)

    def is_store_faster(self, blocks_per_token: float) -> bool:
        """Whether reading blocks from the store takes less time than computing their tokens. Returns True occasionally
        in any case, because the load on the disk may have changed."""
        if self.store is None:
            return False
        read_seconds = self.store.read_seconds
        if read_seconds is None or self._is_faster(blocks_per_token * (read_seconds + self._copy_seconds)):
            return True
        self._num_declined += 1
        return self._num_declined % PROBE_INTERVAL == 0

    def _is_faster(self, seconds: float) -> bool:
        return self.seconds_per_token is None or seconds < self.seconds_per_token

    # Between the device and host memory

    def save(self, block: int, key: BlockKey) -> None:
        """Called when the device evicts a block: copy it to a slot, unless a slot already holds it."""
        if key in self._slots:
            self._slots.move_to_end(key)
            return
        slot = None if key in self._reading else self._take_slot(lambda slot: True)
        if slot is None:
            return
        self._slots[key] = slot
        self._saved.append((key, slot))
        self._saved_in[slot] = self._num_taken
        self._copy(BlockCopy(block, slot, False))
        self.stats.num_stored += 1
        self.stats.stored_bytes += self._block_bytes
        if self._recorder is not None:
            self._recorder.store_in_memory(key)

    def pin(self, keys: Iterable[BlockKey]) -> list[Slot]:
        """Protect blocks from being replaced until `unpin`."""
        return [(key, self._slots.pop(key)) for key in keys]

    def load(self, slot: int, block: int) -> None:
        """Copy a pinned slot to a block of the device."""
        self._copy(BlockCopy(block, slot, True))
        self.stats.num_hits += 1
        self.stats.hit_bytes += self._block_bytes

    def unpin(self, pinned: Iterable[Slot]) -> None:
        self._slots.update(pinned)

    def _copy(self, copy: BlockCopy) -> None:
        self._copies.append(copy)
        self._last_step[copy.slot] = self._num_taken

    def take_copies(self) -> list[BlockCopy]:
        """Take the copies of the step that was just scheduled. Call this for each step that the ranks run."""
        copies = self._copies
        self._copies = []
        self._under_way.append(self._saved)
        self._saved = []
        self._num_taken += 1
        return copies

    def finish_step(self) -> None:
        """Called when the oldest step in flight has a result, so that its copies have been made."""
        number = self._num_finished
        self._num_finished += 1
        saved = self._under_way.popleft()
        if self.store is None:
            return
        for key, slot in saved:
            if self._slots.get(key) == slot and self._saved_in[slot] == number:  # it may have been saved again
                self._unwritten[key] = None

    def _take_slot(self, is_usable: Callable[[int], bool]) -> int | None:
        """Take a free slot, or else that of the least recently used block; None if every slot is in use."""
        if self._free:
            return self._free.pop()
        for key, slot in self._slots.items():
            if key not in self._writing and is_usable(slot):
                del self._slots[key]
                self._unwritten.pop(key, None)
                self.stats.num_evicted += 1
                if self._recorder is not None:
                    self._recorder.remove_from_memory(key)
                return slot
        return None

    # Between host memory and the store

    @property
    def max_reads(self) -> int:
        """Maximum number of blocks to read from the store for one sequence; half of the slots stay for the others."""
        return self.num_slots // 2

    def start_read(self, key: BlockKey) -> bool:
        """Have the store read a block that is in no slot. Returns False if no slot is available."""
        assert self.store is not None
        if key in self._reading:
            return True
        slot = self._take_slot(self._is_at_rest)
        if slot is None:
            return False
        self._reading[key] = slot
        self.store.start_read(key, slot)
        return True

    def _is_at_rest(self, slot: int) -> bool:
        """Whether no step in flight copies to or from the slot."""
        return self._last_step.get(slot, -1) < self._num_finished

    def exchange(self) -> None:
        """Process finished transfers of the store, and have it write newly saved blocks. Call this before each step."""
        if self.store is None:
            return
        for transfer in self.store.take_finished():
            if not transfer.is_read:
                self._writing.discard(transfer.key)
                continue
            slot = self._reading.pop(transfer.key)
            if transfer.is_complete:
                self._slots[transfer.key] = slot
                if self._recorder is not None:
                    self._recorder.store_in_memory(transfer.key)
            else:
                self._free.append(slot)
        while self._unwritten and self.store.is_open and len(self._writing) < min(MAX_WRITES, self.num_slots // 2):
            key, _ = self._unwritten.popitem(last=False)
            self._writing.add(key)
            self.store.start_write(key, self._slots[key])

    def read_stats(self) -> tuple[OffloadStats, OffloadStats | None]:
        """The statistics of host memory, and of the store if there is one."""
        self.stats.num_blocks = len(self._slots)
        self.stats.num_bytes = len(self._slots) * self._block_bytes
        return self.stats, None if self.store is None else self.store.stats

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot has one user and no copy is left over. Call this between steps."""
        used = [*self._free, *self._slots.values(), *self._reading.values()]
        assert sorted(used) == list(range(self.num_slots)), "a slot of host memory is lost, or used twice"
        assert self._writing <= self._slots.keys(), "a block that is being written has lost its slot"
        assert self._unwritten.keys() <= self._slots.keys(), "a block that is to be written has lost its slot"
