"""Attention over a paged KV cache on a GPU. The contract is that of `kernels.attention.paged_attention`.

Sequences with one query (decode) and those with more (prefill) are served by launches of their own, each left out where
the host's lists say that there are none. In decode a program takes all heads of a KV head, so that keys are read once
and the products have rows enough for tensor cores; the keys are split among as many programs as the GPU has room for,
and `combine` adds up the splits. All lengths are read on the device, and a program without keys ends at once.

Batch invariance. By default a row's bits depend on its own sequence, on the number of sequences in the step (in decode,
through the number of splits) and on whether it is computed in decode or prefill; never on the other sequences' lengths
or contents, nor on where a prompt was chunked as long as no chunk is a single token. With `batch_invariant` they
depend on the row's own query and keys alone, in decode, prefill and any chunking: one tile shape for both, splits at
fixed positions added up in their order (by one program, or by `combine` where there are too few programs: the
arithmetic is the same), and no contraction of products and sums by the compiler.
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
from serve_llm.kernels.triton.attend import LOG2_E, Plan, attend, combine

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FIXED_SPLIT = 512  # keys; batch-invariant
MOST_SPLITS = 32
WAVES = 2  # programs in flight on each multiprocessor that decode aims at
MULTIPROCESSORS = 132  # of an H100 or H200: where there is no GPU to ask


class Tiles(NamedTuple):
    """Rows of a program, keys that it visits at once; Triton's warps and stages (loads under way)."""

    rows: int
    tile: int
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

    The last dimension of query and cache is contiguous. Raises ValueError for a dtype without a kernel.
    """
    if query.dtype not in DTYPES or cache.dtype != query.dtype:
        raise ValueError(f"no Triton kernel for queries of {query.dtype} over a cache of {cache.dtype}")
    output = query.new_empty((*query.shape[:2], value_dim or query.shape[2]))
    counts = [end - start for start, end in pairwise(query_starts)]
    for single in (True, False):
        if not any((count == 1) == single for count in counts if count):
            continue
        plan, tiles = _plan(query, cache, value_dim, window, softcap, single, batch_invariant)
        splits = (
            _num_splits(plan, tiles, len(counts) * cache.shape[2], max(context_lens), query.device) if single else 1
        )
        _launch(
            replace(plan, split=splits > 1),
            tiles,
            splits,
            (query, cache, block_table, on_device, sinks, output),
            len(counts) if single else query_starts[-1] // plan.queries + len(counts),
            scale,
        )
    return output


def _plan(
    query: Tensor,
    cache: Tensor,
    value_dim: int | None,
    window: int | None,
    softcap: float | None,
    single: bool,
    batch_invariant: bool,
) -> tuple[Plan, Tiles]:
    """How the sequences with one query, or those with more, are computed on one split."""
    head_dim, group = query.shape[2], query.shape[1] // cache.shape[2]
    main = max(16, triton.next_power_of_2(value_dim or head_dim))
    rest = max(16, triton.next_power_of_2(head_dim - value_dim)) if value_dim and value_dim < head_dim else 0
    tiles = _tiles(query.dtype, main, group if single else None, batch_invariant)
    return Plan(
        single=single,
        split=False,
        fixed=FIXED_SPLIT if batch_invariant else 0,
        group=group,
        chunk=min(group, tiles.rows),
        rows=tiles.rows,
        tile=tiles.tile,
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        main=main,
        rest=rest,
        shared=value_dim is not None,
        block_size=cache.shape[3],
        window=window or 0,
        softcap=softcap or 0.0,
        query_token=query.stride(0),
        query_head=query.stride(1),
        cache_block=cache.stride(0),
        cache_part=cache.stride(1),
        cache_head=cache.stride(2),
        cache_token=cache.stride(3),
    ), tiles


def _tiles(dtype: torch.dtype, main: int, group: int | None, batch_invariant: bool) -> Tiles:
    """For heads of so many padded numbers. group: heads for each KV head, in decode; None: prefill.

    Block numbers are loaded before keys are, so that of the stages about half are keys under way.
    """
    if dtype == torch.float32:  # without tensor cores: exactness is what it is for
        return Tiles(16, 32 if main <= 64 else 16, 4, 3)
    if batch_invariant:
        return Tiles(64, 64, 4, 3) if main <= 128 else Tiles(64, 32, 8, 3)
    if group is None:
        return {512: Tiles(64, 32, 8, 3), 256: Tiles(128, 64, 8, 3)}.get(main, Tiles(128, 128, 8, 3))
    rows = min(64, max(16, triton.next_power_of_2(group)))
    return Tiles(rows, 64 if main <= 128 else 32, 4 if main <= 256 else 8, 5)


def _num_splits(plan: Plan, tiles: Tiles, programs: int, context_len: int, device: torch.device) -> int:
    """Of the keys in decode. programs: without any split. context_len: the most that a sequence may have."""
    programs *= plan.chunks
    aim = WAVES * _multiprocessors(device)
    keys = min(context_len, plan.window + tiles.tile) if plan.window else context_len
    if plan.fixed:
        return 1 if programs >= aim else -(-keys // plan.fixed) + bool(plan.window)
    return max(1, min(MOST_SPLITS, aim // programs, -(-keys // tiles.tile)))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def _launch(
    plan: Plan,
    tiles: Tiles,
    splits: int,
    tensors: tuple[Tensor, Tensor, Tensor, Lengths, Tensor | None, Tensor],
    num_tiles: int,
    scale: float,
) -> None:
    query, cache, block_table, lengths, sinks, output = tensors
    sequences, heads = block_table.shape[0], query.shape[1]
    shape = (sequences, heads, splits) if plan.split else (0,)
    sums = query.new_empty((*shape, plan.main), dtype=torch.float32)
    states = query.new_empty((*shape, 2), dtype=torch.float32)
    factor = LOG2_E.value * (2.0 / plan.softcap if plan.softcap else 1.0)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "enable_fp_fusion": not plan.fixed}
    attend[(num_tiles, cache.shape[2] * plan.chunks, splits)](
        *(query, cache, block_table, *lengths, sinks, output, sums, states),
        *(sequences, block_table.stride(0), scale * factor, plan),
        **options,
    )
    if plan.split:
        options["num_warps"] = 4 if plan.main > 128 else 1
        combine[(sequences, heads)](sums, states, *lengths, sinks, output, splits, plan, **options)
