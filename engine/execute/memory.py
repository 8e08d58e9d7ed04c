"""How much KV cache there is, and how it is cut into blocks. The sums are torch-free.

All KV groups draw equal-byte blocks from one pool: a block holds `block_size` tokens of the group with the most bytes
per token, and a power of two times as many of a group with fewer, such that a request of full length takes the fewest
bytes. Ranks agree on the tokens in a block and on the number of blocks; a block's bytes differ with the KV heads and
layers that a rank holds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from serve_llm.engine.config import CacheRow
from serve_llm.engine.errors import CapacityError
from serve_llm.engine.model.spec import KVGroup
from serve_llm.engine.schedule.sequence import GroupLayout, most_blocks

logger = logging.getLogger(__name__)

CPU_SHARE = 0.4  # of the free memory, at most, unless --kv-cache-memory says otherwise
CPU_CONCURRENCY = 16  # requests of full length for which the default CPU cache has room, memory permitting
RANK_BYTES = 128 << 20  # that Python and torch take in each rank's process
CPU_SMALLEST = 256 << 20  # bytes; a small model's default cache is at least this


@dataclass(frozen=True)
class CacheLayout:
    """The KV cache of one rank: `num_blocks` blocks of `block_bytes`, and what each group puts into one.

    Of several ranks' layouts the one with the largest `block_bytes` is what limits them all."""

    groups: tuple[GroupLayout, ...]
    block_bytes: int
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def blocks_per_request(self, num_tokens: int, max_chunk: int) -> int:
        """Blocks that one request of so many tokens holds at most at a time."""
        return sum(most_blocks(group, num_tokens, max_chunk) for group in self.groups)


def bytes_per_token(group: KVGroup, row: CacheRow) -> int:
    """Keys and values of one token in all layers of the group."""
    return len(group.layers) * (1 if group.is_latent else 2) * group.kv_heads * row.num_bytes(group.head_dim)


def plan_cache(
    whole: Sequence[KVGroup],
    own: Sequence[KVGroup],
    row: CacheRow,
    block_size: int,
    num_bytes: int,
    *,
    max_model_len: int,
    max_chunk: int,
) -> CacheLayout:
    """Cut `num_bytes` of one rank into blocks.

    whole: the model's groups, which alone decide how many tokens of each lie in a block, so that all ranks agree: the
    largest group has `block_size` (a power of two). own: the same groups with the layers and KV heads of this rank; a
    block has the bytes that the neediest of them takes. A rank without any KV has blocks of one element.
    max_model_len, max_chunk: tokens of the request that takes the fewest bytes, and of one step.
    """
    sizes = [bytes_per_token(group, row) for group in whole]
    # each group in turn fills the blocks to the last byte
    rooms = sorted(size << (-(-max(sizes) // size) - 1).bit_length() for size in sizes)

    def with_room(room: int) -> CacheLayout:
        """Blocks of so many bytes for each of `block_size` tokens."""
        powers = [(room // size).bit_length() - 1 for size in sizes]
        layouts = [GroupLayout(block_size << power, group.window) for power, group in zip(powers, whole, strict=True)]
        return CacheLayout(tuple(layouts), room * block_size, 0)

    layouts = min(
        map(with_room, rooms), key=lambda found: found.block_bytes * found.blocks_per_request(max_model_len, max_chunk)
    ).groups
    needs = [lie.block_size * bytes_per_token(group, row) for lie, group in zip(layouts, own, strict=True)]
    block_bytes = max(*needs, row.element_bytes)
    return CacheLayout(layouts, block_bytes, num_bytes // block_bytes)


def default_cpu_bytes(one_request: int, local_ranks: int, free: int) -> int:
    """Size of one rank's KV cache on a CPU when the user names none. `one_request`: its bytes for one of full length.
    local_ranks: that share the machine's memory. free: bytes of it, once all weights are loaded."""
    wanted = max(CPU_CONCURRENCY * one_request, CPU_SMALLEST // local_ranks)
    return min(wanted, int(CPU_SHARE * free) // local_ranks)


def check_free(num_bytes: int, local_ranks: int, free: int) -> None:
    """Raises CapacityError if the KV caches that --kv-cache-memory names do not fit into a machine's memory: they would
    as long as nothing is in them. num_bytes: of each of `local_ranks` ranks. free: once weights are loaded."""
    if num_bytes * local_ranks > free:
        each = f" for each of {local_ranks} ranks" if local_ranks > 1 else ""
        raise CapacityError(
            f"--kv-cache-memory: {size_text(num_bytes)}{each}, but only {size_text(free)} of memory are free here; "
            f"give at most {free // local_ranks} bytes, or leave it away"
        )


def check_ranks(num_ranks: int, free: int) -> None:
    """Raises CapacityError if so many ranks of one host do not fit, whatever the model. free: bytes of memory."""
    if num_ranks * RANK_BYTES > free:
        raise CapacityError(
            f"{num_ranks} ranks on this host take at least {size_text(num_ranks * RANK_BYTES)} of memory before a "
            f"weight is loaded, but only {size_text(free)} are free; lower --tensor-parallel-size or "
            "--pipeline-parallel-size, or use more hosts"
        )


def check_capacity(layout: CacheLayout, max_model_len: int, max_chunk: int, device: str) -> None:
    """Log the capacity in the field's words. Raises CapacityError if not even one request of full length fits."""
    needed = layout.blocks_per_request(max_model_len, max_chunk)
    tokens = cache_tokens(layout, max_model_len, max_chunk)
    if layout.num_blocks < needed:
        raise CapacityError(
            f"the KV cache has room for {tokens:,} tokens, but one request may need {max_model_len:,}: "
            f"lower --max-model-len to at most {max(tokens, 1)}, or raise --kv-cache-memory from "
            f"{layout.num_bytes:,} to at least {needed * layout.block_bytes:,} bytes"
        )
    for line in capacity_lines(tokens, layout.num_blocks / needed, max_model_len, device):
        logger.info(line)


def capacity_lines(tokens: int, concurrency: float, max_model_len: int, device: str) -> tuple[str, str]:
    """The capacity in the field's words."""
    return (
        f"{'CPU' if device == 'cpu' else 'GPU'} KV cache size: {tokens:,} tokens",
        f"Maximum concurrency for {max_model_len:,} tokens per request: {concurrency:.2f}x",
    )


def size_text(num_bytes: int) -> str:
    """Bytes for people: 13.01 MiB, 1.50 GiB."""
    mebibytes = num_bytes / 2**20
    return f"{mebibytes:.2f} MiB" if abs(mebibytes) < 1024 else f"{mebibytes / 1024:,.2f} GiB"


def cache_tokens(layout: CacheLayout, max_model_len: int, max_chunk: int) -> int:
    """Tokens that fit, in requests of full length (with sliding windows a token may need less)."""
    return layout.num_blocks * max_model_len // layout.blocks_per_request(max_model_len, max_chunk)


def free_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take: the machine's available memory, and the cgroup's rest if it is less.

    The cgroup counts files that were read, a checkpoint for example, as used; the kernel lets go of them when asked.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_"),
    ):
        try:
            most, taken = (int((cgroup / name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in (cgroup / limit).with_name("memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such controller, or "max"
            continue
        files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        free = min(free, max(most - max(taken - files, 0), 0))
    return free
