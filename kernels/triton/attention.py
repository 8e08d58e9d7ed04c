"""Attention over a paged KV cache on a GPU. Contract: `kernels.attention.paged_attention`.

Sequences with one query (decode) and with more (prefill) take separate launches; a launch without sequences is skipped.
A program computes as many query heads of a KV head as fit, so that keys are read once and the products fill
tensor cores. Both launches take their programs from work lists, which a kernel makes on the device from the lengths,
once per step and KV group: a long context is split among many programs, and `combine` merges the splits. The grid is
fixed, so a captured step serves all lengths.

Batch invariance. By default a row's bits depend on how its keys are split, so on the lengths of all sequences in the
step, and on whether it is computed in decode or prefill. They never depend on the contents of other sequences. With
`batch_invariant` they depend on the row's own query and keys alone: decode and prefill share one tile shape, splits
start at fixed positions and are merged in order (by one program or by `combine`, with the same arithmetic), and the
compiler must not contract products and sums.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from serve_llm.kernels import cache_fp8
from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.triton.attend import ITEM_FIELDS, LOG2_E, SplitPlan, attend, combine
from serve_llm.kernels.triton.work_list import make_work_list

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BATCH_INVARIANT_SPLIT = 512  # keys
PROGRAMS_PER_MULTIPROCESSOR = 2  # that splits aim at
LARGE_SHARED_BYTES = 160 * 1024  # server cards from A100 on have at least that; other cards have about 99 KB
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
    alibi_slopes: Tensor | None = None,
    value_dim: int | None = None,
    cache_scales: Tensor | None = None,
    on_device: Lengths,
    batch_invariant: bool = False,
) -> Tensor:
    """See `kernels.attention.paged_attention`, and this module for `batch_invariant`.

    The last dimension of query and cache must be contiguous. Raises ValueError for a dtype without a kernel.
    """
    if query.dtype not in DTYPES or cache.dtype not in (query.dtype, cache_fp8.DTYPE):
        raise ValueError(f"no Triton kernel for queries of {query.dtype} over a cache of {cache.dtype}")
    output = query.new_empty((*query.shape[:2], value_dim or query.shape[2]))
    has_alibi = alibi_slopes is not None
    key = (query.shape[1:], query.stride(), cache.shape[1:], cache.stride(), value_dim, window, softcap, has_alibi)
    launches = on_device.plans.get(key)
    if launches is None:
        launches = []
        query_lens = [end - start for start, end in pairwise(query_starts)]
        for single_query in (True, False):
            if any((length == 1) == single_query for length in query_lens if length):
                tiles = _choose_tiles(query, cache, value_dim, single_query, batch_invariant)
                fixed_split = BATCH_INVARIANT_SPLIT if batch_invariant else 0
                plan = _make_plan(query, cache, value_dim, window, softcap, has_alibi, single_query, tiles, fixed_split)
                launches.append(_prepare(plan, tiles, query, cache, query_starts, max(context_lens), on_device))
        on_device.plans[key] = launches
    for launch in launches:
        launch.run(query, cache, block_table, sinks, alibi_slopes, cache_scales, output, scale)
    return output


class _Launch(NamedTuple):
    """`attend` and, if some items are splits, `combine`: all but the tensors of a layer."""

    plan: SplitPlan
    grid: tuple[int, int]
    combine_grid: tuple[int, int, int]
    options: dict[str, Any]
    combine_options: dict[str, Any]
    items: Tensor
    split_values: Tensor  # reused: the next layer overwrites them
    split_stats: Tensor

    def run(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
        cache_scales: Tensor | None,
        output: Tensor,
        scale: float,
    ) -> None:
        softcap = self.plan.softcap
        attend[self.grid](
            query,
            cache,
            block_table,
            self.items,
            sinks,
            alibi_slopes,
            cache_scales,
            output,
            self.split_values,
            self.split_stats,
            block_table.stride(0),
            scale * LOG2_E.value * (2.0 / softcap if softcap else 1.0),
            self.plan,
            **self.options,
        )
        if self.plan.split:
            combine[self.combine_grid](
                self.split_values,
                self.split_stats,
                self.items,
                sinks,
                cache_scales,
                output,
                self.plan,
                **self.combine_options,
            )


def _prepare(
    plan: SplitPlan,
    tiles: Tiles,
    query: Tensor,
    cache: Tensor,
    query_starts: Sequence[int],
    longest_context: int,
    on_device: Lengths,
) -> _Launch:
    """Create the work list of this step. plan: without splits. longest_context: an upper bound, as are query_starts."""
    sequences = len(query_starts) - 1
    num_tiles = sequences if plan.single_query else query_starts[-1] // plan.queries_per_tile + sequences
    num_programs = cache.shape[2] * plan.head_tiles  # for each item
    target = PROGRAMS_PER_MULTIPROCESSOR * _num_multiprocessors(query.device) // num_programs
    num_splits = _bound_splits(plan, target, num_tiles, longest_context)
    num_items = num_tiles + num_splits
    plan = replace(plan, split=num_splits > 0)
    items = query.new_empty((num_items, ITEM_FIELDS.value), dtype=torch.int32)
    options = {"num_warps": 4, "num_stages": 1}
    make_work_list[(1,)](
        on_device.query_starts,
        on_device.context_lens,
        items,
        sequences,
        num_tiles,
        num_items,
        num_splits,
        target,
        plan,
        **options,
    )
    partial = (num_splits, num_programs, plan.rows)
    # A product and a sum must not be contracted in one kernel and not in the other.
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": not plan.fixed_split}
    rows = plan.heads_per_tile if plan.single_query else plan.rows
    return _Launch(
        plan,
        (num_items, num_programs),
        (num_splits, num_programs, -(-rows // plan.rows_to_combine)),
        options,
        {**options, "num_warps": 4},
        items,
        query.new_empty((*partial, plan.main_dim), dtype=torch.float32),
        query.new_empty((*partial, 2), dtype=torch.float32),
    )


def _bound_splits(plan: SplitPlan, target: int, num_tiles: int, longest_context: int) -> int:
    """Return the maximum number of splits that the work list may have; 0 if it cannot split. target: items that share
    the keys equally."""
    num_keys = longest_context
    if plan.window:
        num_keys = min(num_keys, plan.window + plan.queries_per_tile + plan.unit)
    most_units = -(-num_keys // plan.unit) + bool(plan.window)
    if target < 2 or most_units < 2:
        return 0
    enough = 2 * target if not plan.fixed_split else max(2 * target, most_units)
    return min(enough, num_tiles * most_units)


def _make_plan(
    query: Tensor,
    cache: Tensor,
    value_dim: int | None,
    window: int | None,
    softcap: float | None,
    has_alibi: bool,
    single_query: bool,
    tiles: Tiles,
    fixed_split: int,
) -> SplitPlan:
    """Return the compile-time parameters, without splits."""
    head_dim = query.shape[2]
    group_size = query.shape[1] // cache.shape[2]
    main_dim, rest_dim = _pad_dims(head_dim, value_dim)
    return SplitPlan(
        single_query=single_query,
        split=False,
        fixed_split=fixed_split,
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
        has_alibi=has_alibi,
        query_token_stride=query.stride(0),
        query_head_stride=query.stride(1),
        cache_block_stride=cache.stride(0),
        cache_part_stride=cache.stride(1),
        cache_head_stride=cache.stride(2),
        cache_token_stride=cache.stride(3),
    )


def _pad_dims(head_dim: int, value_dim: int | None) -> tuple[int, int]:
    """Return the padded sizes of the two parts of a key; see `SplitPlan`."""
    main_dim = max(16, triton.next_power_of_2(value_dim or head_dim))
    rest_dim = max(16, triton.next_power_of_2(head_dim - value_dim)) if value_dim and value_dim < head_dim else 0
    return main_dim, rest_dim


def _choose_tiles(
    query: Tensor, cache: Tensor, value_dim: int | None, single_query: bool, batch_invariant: bool
) -> Tiles:
    """Choose the tile sizes.

    A block number is loaded before its keys, so only about half of the stages hold keys. The log in docs/performance.md
    has the times of other tiles on an H200. Cards with 99 KB of shared memory for a program get smaller tiles for large
    heads.
    """
    main_dim, _ = _pad_dims(query.shape[2], value_dim)
    is_small = _shared_bytes(query.device) < LARGE_SHARED_BYTES
    if query.dtype == torch.float32:  # exact, so without tensor cores
        return Tiles(16, 32 if main_dim <= 64 else 16, 4, 3)
    if batch_invariant:
        return {512: Tiles(32, 32, 8, 2), 256: Tiles(64, 32, 8, 3)}.get(main_dim, Tiles(64, 64, 4, 3))
    if main_dim == 512 and is_small:
        return Tiles(32, 32, 8, 2)
    if not single_query:
        large_head = Tiles(64, 32, 8, 3) if is_small else Tiles(128, 64, 8, 3)
        return {512: Tiles(64, 32, 8, 3), 256: large_head}.get(main_dim, Tiles(128, 128, 8, 3))
    rows = min(64, max(16, triton.next_power_of_2(query.shape[1] // cache.shape[2])))
    if main_dim == 512:
        return Tiles(rows, 32, 8, 3)
    if main_dim <= 128 and not is_small:
        return Tiles(rows, 128, 4, 3)
    return Tiles(rows, 64 if main_dim <= 128 else 32, 4, 5)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Return the shared memory that one program can have."""
    if device.type != "cuda":
        return LARGE_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # its stubs lack the next name
    return int(properties.shared_memory_per_block_optin)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return NUM_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
