"""Attention over a paged KV cache on a GPU. Contract: `kernels.attention.paged_attention`.

Sequences with one query (decode) and with more (prefill) take separate launches; a launch without sequences is skipped.
In decode a program computes all query heads of a KV head, so that keys are read once and the products fill tensor
cores. The keys are split among as many programs as the GPU has room for, and `combine` merges the splits. The kernels
read all lengths on the device, and a program without keys returns at once.

Batch invariance. By default a row's bits depend on its own sequence, on the number of sequences in the step (in decode,
through the number of splits) and on whether it is computed in decode or prefill. They never depend on the lengths or
contents of other sequences, nor on the chunks of a prompt, as long as no chunk is a single token. With
`batch_invariant` they depend on the row's own query and keys alone: decode and prefill share one tile shape, splits
start at fixed positions and are merged in order (by one program or by `combine`, with the same arithmetic), and the
compiler must not contract products and sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.triton.attend import LOG2_E, SplitPlan, attend, combine

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BATCH_INVARIANT_SPLIT = 512  # keys
MAX_SPLITS = 32
PROGRAMS_PER_MULTIPROCESSOR = 2  # target for decode
NUM_MULTIPROCESSORS = 132  # H100 and H200; used where no GPU is present


class Tiles(NamedTuple):
    """Rows of a program, keys of a tile, and Triton's warps and pipeline stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
    on_device: Lengths,
    batch_invariant: bool = False,
) -> Tensor:
    """See `kernels.attention.paged_attention`, and this module for `batch_invariant`.

    The last dimension of query and cache must be contiguous. Raises ValueError for a dtype without a kernel.
    """
    if query.dtype not in DTYPES or cache.dtype != query.dtype:
        raise ValueError(f"no Triton kernel for queries of {query.dtype} over a cache of {cache.dtype}")
    output = query.new_empty((*query.shape[:2], value_dim or query.shape[2]))
    query_lens = [end - start for start, end in pairwise(query_starts)]
    for single_query in (True, False):
        if not any((length == 1) == single_query for length in query_lens if length):
            continue
        plan, tiles = _make_plan(query, cache, value_dim, window, softcap, single_query, batch_invariant)
        num_splits = 1
        num_tiles = query_starts[-1] // plan.queries_per_tile + len(query_lens)
        if single_query:
            num_programs = len(query_lens) * cache.shape[2] * plan.head_tiles
            num_splits = _choose_num_splits(plan, num_programs, max(context_lens), query.device)
            num_tiles = len(query_lens)
        _launch(
            replace(plan, split=num_splits > 1),
            tiles,
            (num_tiles, cache.shape[2] * plan.head_tiles, num_splits),
            (query, cache, block_table, on_device, sinks, output),
            scale,
        )
    return output


def _make_plan(
    query: Tensor,
    cache: Tensor,
    value_dim: int | None,
    window: int | None,
    softcap: float | None,
    single_query: bool,
    batch_invariant: bool,
) -> tuple[SplitPlan, Tiles]:
    """Return the compile-time parameters for one split, and the tile sizes."""
    head_dim = query.shape[2]
    group_size = query.shape[1] // cache.shape[2]
    main_dim = max(16, triton.next_power_of_2(value_dim or head_dim))
    rest_dim = max(16, triton.next_power_of_2(head_dim - value_dim)) if value_dim and value_dim < head_dim else 0
    tiles = _choose_tiles(query.dtype, main_dim, group_size if single_query else None, batch_invariant)
    return SplitPlan(
        single_query=single_query,
        split=False,
        fixed_split=BATCH_INVARIANT_SPLIT if batch_invariant else 0,
        group_size=group_size,
        heads_per_tile=min(group_size, tiles.rows),
        rows=tiles.rows,
        key_tile=tiles.keys,
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        main_dim=main_dim,
        rest_dim=rest_dim,
        values_in_keys=value_dim is not None,
        block_size=cache.shape[3],
        window=window or 0,
        softcap=softcap or 0.0,
        query_token_stride=query.stride(0),
        query_head_stride=query.stride(1),
        cache_block_stride=cache.stride(0),
        cache_part_stride=cache.stride(1),
        cache_head_stride=cache.stride(2),
        cache_token_stride=cache.stride(3),
    ), tiles


def _choose_tiles(dtype: torch.dtype, main_dim: int, group_size: int | None, batch_invariant: bool) -> Tiles:
    """main_dim: padded head_dim. group_size: query heads of one KV head in decode; None: prefill.

    A block number is loaded before its keys, so only about half of the stages hold keys.
    """
    if dtype == torch.float32:  # exact, so without tensor cores
        return Tiles(16, 32 if main_dim <= 64 else 16, 4, 3)
    if batch_invariant:
        return Tiles(64, 64, 4, 3) if main_dim <= 128 else Tiles(64, 32, 8, 3)
    if group_size is None:
        return {512: Tiles(64, 32, 8, 3), 256: Tiles(128, 64, 8, 3)}.get(main_dim, Tiles(128, 128, 8, 3))
    rows = min(64, max(16, triton.next_power_of_2(group_size)))
    return Tiles(rows, 64 if main_dim <= 128 else 32, 4 if main_dim <= 256 else 8, 5)


def _choose_num_splits(plan: SplitPlan, num_programs: int, max_context_len: int, device: torch.device) -> int:
    """Return the number of splits of the keys in decode. num_programs: without splits."""
    target = PROGRAMS_PER_MULTIPROCESSOR * _num_multiprocessors(device)
    num_keys = min(max_context_len, plan.window + plan.key_tile) if plan.window else max_context_len
    if plan.fixed_split:
        return 1 if num_programs >= target else -(-num_keys // plan.fixed_split) + bool(plan.window)
    return max(1, min(MAX_SPLITS, target // num_programs, -(-num_keys // plan.key_tile)))


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return NUM_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(
    plan: SplitPlan,
    tiles: Tiles,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, Tensor, Tensor, Lengths, Tensor | None, Tensor],
    scale: float,
) -> None:
    """Run `attend`, and `combine` if the keys are split. grid: (tiles of queries, tiles of heads, splits)."""
    query, cache, block_table, (starts, contexts), sinks, output = tensors
    sequences, heads = block_table.shape[0], query.shape[1]
    shape = (sequences, heads, grid[2]) if plan.split else (0,)
    split_values = query.new_empty((*shape, plan.main_dim), dtype=torch.float32)
    split_stats = query.new_empty((*shape, 2), dtype=torch.float32)
    scale *= LOG2_E.value * (2.0 / plan.softcap if plan.softcap else 1.0)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": not plan.fixed_split}
    attend[grid](
        query,
        cache,
        block_table,
        starts,
        contexts,
        sinks,
        output,
        split_values,
        split_stats,
        sequences,
        block_table.stride(0),
        scale,
        plan,
        **options,
    )
    if plan.split:
        options["num_warps"] = 4 if plan.main_dim > 128 else 1
        combine[(sequences, heads)](
            split_values, split_stats, starts, contexts, sinks, output, grid[2], plan, **options
        )
