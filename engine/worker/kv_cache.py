"""Size and layout of the KV cache. Arithmetic only, torch-free; `memory.py` allocates it.

All KV groups draw blocks of equal bytes from one pool. A block holds `block_size` tokens of the group with the most
bytes per token, and a power of two times as many of a group with fewer, chosen so that a request of full length takes
the fewest bytes. Ranks agree on the tokens per block and on the number of blocks; the bytes of a block differ with the
KV heads and layers of a rank.

If sequences also have states, each running one has a slot for them. The number of slots is derived from that of blocks,
so ranks agree on it too: `--max-num-seqs`, unless they would take more memory than the blocks. The same holds for
snapshots of states, from which prefixes are continued, of which there may be MIN_SNAPSHOTS or more.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from serve_llm.common.errors import CapacityError, OptionError
from serve_llm.engine.config import Config, KVCacheFormat
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import KVGroup, ModelSpec
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.parallel.shm import ShmHandle
from serve_llm.engine.scheduler.sequence import KVCacheSpec, max_blocks

logger = logging.getLogger(__name__)

CPU_SHARE = 0.4  # largest fraction of the free memory without --kv-cache-memory
CPU_CONCURRENCY = 16  # requests of full length that fit into the default CPU cache, memory permitting
RANK_BYTES = 128 << 20  # used by Python and torch in each worker process
CPU_SMALLEST = 256 << 20  # bytes; smallest default cache on a CPU
MIN_SNAPSHOTS = 16  # for which there is room, memory permitting, even if fewer sequences run at a time
SLOTS_OFFSET = 4096  # bytes before the slots in shared memory


@dataclass(frozen=True)
class KVCacheConfig:
    """The KV cache of one rank: `num_blocks` blocks of `block_bytes`, and how each group uses a block.

    Among the configs of several ranks, the one with the largest `block_bytes` limits all."""

    groups: tuple[KVCacheSpec, ...]
    block_bytes: int
    num_blocks: int
    num_slots: int = 0  # slots in host memory for evicted blocks
    state_bytes: int = 0  # a sequence's states on this rank
    max_states: int = 0  # maximum number of sequences with states; 0: the model has none
    max_snapshots: int = 0  # maximum number of snapshots of states; 0: without a prefix cache
    blocks_per_state: int = 1  # the cache has at least this many blocks for each sequence with states, or snapshot

    @property
    def num_states(self) -> int:
        """Slots for the states of sequences."""
        return min(self.max_states, max(1, self.num_blocks // self.blocks_per_state))

    @property
    def num_snapshots(self) -> int:
        """Slots for snapshots of states, after the others."""
        return min(self.max_snapshots, self.num_blocks // self.blocks_per_state)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes + (self.num_states + self.num_snapshots) * self.state_bytes

    @property
    def max_state_bytes(self) -> int:
        """Bytes of as many states and snapshots as there may be."""
        return (self.max_states + self.max_snapshots) * self.state_bytes

    def count_sequences(self, max_num_seqs: int) -> int:
        """Maximum number of running sequences. max_num_seqs: value of the option."""
        return min(max_num_seqs, self.num_states) if self.max_states else max_num_seqs

    def fill(self, num_bytes: int) -> KVCacheConfig:
        """The same with as many blocks as fit into `num_bytes` together with their states."""
        candidates = range(num_bytes // self.block_bytes + 1)
        fitting = bisect_right(candidates, num_bytes, key=lambda number: replace(self, num_blocks=number).num_bytes)
        return replace(self, num_blocks=max(0, fitting - 1))

    def blocks_per_request(self, num_tokens: int, max_chunk: int) -> int:
        """Maximum number of blocks that one request of `num_tokens` holds at a time."""
        return sum(max_blocks(group, num_tokens, max_chunk) for group in self.groups)


@dataclass(frozen=True)
class StateSizes:
    """The states of sequences, besides their KV, with the inputs of the drafts that a step may have."""

    model_bytes: int  # bytes of a sequence's states in all layers
    rank_bytes: int  # bytes of those in the rank's layers
    max_num_seqs: int
    max_snapshots: int = 0


def find_state_sizes(spec: ModelSpec, shard: Shard, config: Config) -> StateSizes | None:
    """None for a model without states."""
    if not spec.has_states:
        return None
    whole = Shard(ParallelLayout(), 0, range(len(spec.layers)))
    model_bytes, rank_bytes = (one.count_state_bytes(spec, config.num_drafts) for one in (whole, shard))
    max_snapshots = max(MIN_SNAPSHOTS, config.max_num_seqs) if config.enable_prefix_caching else 0
    return StateSizes(model_bytes, rank_bytes, config.max_num_seqs, max_snapshots)


class HostMemory(msgspec.Struct, frozen=True):
    """The slots of one rank: shared memory that begins with SLOTS_OFFSET other bytes."""

    handle: ShmHandle
    num_slots: int
    block_bytes: int  # in each slot
    copy_seconds: float  # time to copy a block to the device


def bytes_per_token(group: KVGroup, cache_format: KVCacheFormat) -> int:
    """Bytes of the keys and values of one token in all layers of the group."""
    parts = 1 if group.is_latent else 2
    return len(group.layers) * parts * group.num_kv_heads * cache_format.num_bytes(group.head_dim)


def plan_cache(
    model_groups: Sequence[KVGroup],
    rank_groups: Sequence[KVGroup],
    cache_format: KVCacheFormat,
    block_size: int,
    num_bytes: int,
    *,
    max_model_len: int,
    max_chunk: int,
    states: StateSizes | None = None,
) -> KVCacheConfig:
    """Divide `num_bytes` of one rank into blocks.

    model_groups: the KV groups of the whole model. They alone decide how many tokens of each group a block holds, so
    that all ranks agree: the group with the most bytes per token has `block_size` (a power of two).
    rank_groups: the same groups with the layers and KV heads of this rank. The group that needs most determines the
    bytes of a block; a rank without any KV has blocks of one element.
    max_model_len, max_chunk: tokens of the request whose bytes are minimised, and most of its tokens in one step.
    states: of sequences; None: they have none.
    Without groups (encoders) there is one unused block. Raises OptionError if chunks are not whole blocks.
    """
    if not model_groups:
        return KVCacheConfig((), cache_format.element_bytes, 1)
    sizes = [bytes_per_token(group, cache_format) for group in model_groups]
    # candidates: bytes per `block_size` tokens that one group after another fills completely
    candidates = sorted(size << (-(-max(sizes) // size) - 1).bit_length() for size in sizes)

    def build_config(bytes_per_slot: int) -> KVCacheConfig:
        group_specs = []
        for size, group in zip(sizes, model_groups, strict=True):
            power = (bytes_per_slot // size).bit_length() - 1
            group_specs.append(KVCacheSpec(block_size << power, group.sliding_window, group.chunked))
        return KVCacheConfig(tuple(group_specs), bytes_per_slot * block_size, 0)

    configs = [one for one in map(build_config, candidates) if all(map(_has_whole_chunks, one.groups))]
    if not configs:
        chunk = next(group.sliding_window for group in model_groups if group.chunked)
        raise OptionError(
            f"--block-size {block_size}: some layers attend within chunks of {chunk} tokens, which must be "
            f"whole blocks; choose a smaller size, or --max-model-len {chunk}"
        )
    best = min(configs, key=lambda one: one.block_bytes * one.blocks_per_request(max_model_len, max_chunk))
    block_bytes = cache_format.element_bytes
    for group_spec, group in zip(best.groups, rank_groups, strict=True):
        block_bytes = max(block_bytes, group_spec.block_size * bytes_per_token(group, cache_format))
    kv_cache_config = KVCacheConfig(best.groups, block_bytes, 0)
    if states is not None:
        blocks_per_state = max(1, -(-states.model_bytes // best.block_bytes))
        kv_cache_config = replace(
            kv_cache_config,
            state_bytes=states.rank_bytes,
            max_states=states.max_num_seqs,
            max_snapshots=states.max_snapshots,
            blocks_per_state=blocks_per_state,
        )
    return kv_cache_config.fill(num_bytes)


def _has_whole_chunks(group: KVCacheSpec) -> bool:
    return group.chunk_size is None or group.chunk_size % group.block_size == 0


def plan_empty_cache(spec: ModelSpec, shard: Shard, config: Config) -> KVCacheConfig:
    """Plan a rank's KV cache, without blocks."""
    return plan_cache(
        spec.kv_groups,
        shard.kv_groups(spec),
        config.kv_cache_format,
        config.block_size,
        0,
        max_model_len=config.max_model_len,
        max_chunk=config.max_num_batched_tokens,
        states=find_state_sizes(spec, shard, config),
    )


def choose_cpu_cache_bytes(request_bytes: int, local_ranks: int, free: int, state_bytes: int = 0) -> int:
    """Bytes of one rank's KV cache on a CPU without --kv-cache-memory.

    request_bytes: KV of one request of full length. local_ranks: ranks that share this host's memory. free: bytes of
    free memory once all weights are loaded. state_bytes: of all states and snapshots that there may be.
    """
    wanted = max(CPU_CONCURRENCY * request_bytes + state_bytes, CPU_SMALLEST // local_ranks)
    return min(wanted, int(CPU_SHARE * free) // local_ranks)


def check_free(num_bytes: int, local_ranks: int, free: int, option: str = "--kv-cache-memory") -> None:
    """Raise CapacityError if the option's bytes exceed a host's memory: allocating would succeed, filling would not.

    num_bytes: for each of `local_ranks` ranks. free: bytes of free memory once weights are loaded.
    """
    if num_bytes * local_ranks > free:
        each = f" for each of {local_ranks} ranks" if local_ranks > 1 else ""
        raise CapacityError(
            f"{option}: {format_bytes(num_bytes)}{each}, but only {format_bytes(free)} of memory are free here; "
            f"give at most {free // local_ranks} bytes, or omit it"
        )


def check_ranks(num_ranks: int, free: int) -> None:
    """Raise CapacityError if `num_ranks` processes do not fit on one host, whatever the model. free: bytes."""
    if num_ranks * RANK_BYTES > free:
        raise CapacityError(
            f"{num_ranks} ranks on this host take at least {format_bytes(num_ranks * RANK_BYTES)} of memory before a "
            f"weight is loaded, but only {format_bytes(free)} are free; lower --tensor-parallel-size or "
            "--pipeline-parallel-size, or use more hosts"
        )


def check_capacity(kv_cache_config: KVCacheConfig, max_model_len: int, max_chunk: int, device: str) -> None:
    """Log the capacity. Raise CapacityError if not even one request of full length fits."""
    if not kv_cache_config.groups:
        logger.info("No KV cache: the model computes each prompt in one step")
        return
    needed = kv_cache_config.blocks_per_request(max_model_len, max_chunk)
    tokens = count_cache_tokens(kv_cache_config, max_model_len, max_chunk)
    if kv_cache_config.num_blocks < needed:
        raise CapacityError(
            f"the KV cache has room for {tokens:,} tokens, but one request may need {max_model_len:,}: "
            f"lower --max-model-len to at most {max(tokens, 1)}, or raise --kv-cache-memory from "
            f"{kv_cache_config.num_bytes:,} to at least {replace(kv_cache_config, num_blocks=needed).num_bytes:,} bytes"
        )
    for line in (
        *describe_states(kv_cache_config),
        *describe_capacity(tokens, find_concurrency(kv_cache_config, needed), max_model_len, device),
    ):
        logger.info(line)


def check_offload(kv_cache_configs: Sequence[KVCacheConfig], num_bytes: int | None) -> None:
    """Log how much fits into --kv-offload-memory. num_bytes: of each rank; None: not given. Raise CapacityError if not
    even one block fits."""
    if num_bytes is None:
        return
    num_slots = kv_cache_configs[0].num_slots
    block_bytes = max(one.block_bytes for one in kv_cache_configs)
    if not num_slots:
        raise CapacityError(
            f"--kv-offload-memory: a block of the KV cache takes {block_bytes:,} bytes, so {num_bytes:,} hold none"
        )
    logger.info(
        "Host memory for blocks evicted from the KV cache: %s blocks, %s per rank",
        f"{num_slots:,}",
        format_bytes(num_slots * block_bytes),
    )


def describe_states(kv_cache_config: KVCacheConfig) -> list[str]:
    """Empty for a model without states."""
    if not kv_cache_config.max_states:
        return []
    size = f"of {format_bytes(kv_cache_config.state_bytes)} per rank"
    lines = [f"States of linear attention, one for each running sequence: {kv_cache_config.num_states} {size}"]
    if kv_cache_config.max_snapshots:
        lines.append(f"Snapshots of states, one for each cached prefix: {kv_cache_config.num_snapshots} {size}")
    return lines


def describe_capacity(tokens: int, concurrency: float, max_model_len: int, device: str) -> tuple[str, str]:
    """Describe the capacity in vLLM's words."""
    return (
        f"{'CPU' if device == 'cpu' else 'GPU'} KV cache size: {tokens:,} tokens",
        f"Maximum concurrency for {max_model_len:,} tokens per request: {concurrency:.2f}x",
    )


def describe_memory(weights: Sequence[int], caches: Sequence[int]) -> str:
    """Format the bytes of each rank's weights and KV cache, in rank order, for the start-up log."""
    return f"Weights: {' + '.join(map(format_bytes, weights))}, KV cache: {' + '.join(map(format_bytes, caches))}"


def format_bytes(num_bytes: int) -> str:
    """Bytes in readable form: 13.01 MiB, 1.50 GiB."""
    mebibytes = num_bytes / 2**20
    return f"{mebibytes:.2f} MiB" if abs(mebibytes) < 1024 else f"{mebibytes / 1024:,.2f} GiB"


def find_concurrency(kv_cache_config: KVCacheConfig, blocks_per_request: int) -> float:
    """Requests of full length that fit at the same time."""
    concurrency = kv_cache_config.num_blocks / blocks_per_request
    return min(concurrency, kv_cache_config.num_states) if kv_cache_config.max_states else concurrency


def count_cache_tokens(kv_cache_config: KVCacheConfig, max_model_len: int, max_chunk: int) -> int:
    """Number of tokens that fit, in requests of full length (with sliding windows, a token may need less); 0 without
    KV."""
    if not kv_cache_config.groups:
        return 0
    tokens = kv_cache_config.num_blocks * max_model_len // kv_cache_config.blocks_per_request(max_model_len, max_chunk)
    return min(tokens, kv_cache_config.num_states * max_model_len) if kv_cache_config.max_states else tokens


def find_free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still allocate: the host's available memory, or what its cgroup leaves if that is
    less.

    The cgroup counts files that were read, such as a checkpoint, as used; the kernel drops them when memory is needed.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_file, usage_file, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_"),
    ):
        try:
            limit = int((cgroup / limit_file).read_text())
            usage = int((cgroup / usage_file).read_text())
            stat_file = (cgroup / limit_file).with_name("memory.stat")
            stat = dict(line.split() for line in stat_file.read_text().splitlines())
        except (OSError, ValueError):  # no such controller, or "max"
            continue
        file_bytes = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        free = min(free, max(limit - max(usage - file_bytes, 0), 0))
    return free
