"""Sample a token from each row of logits, and compute log-probabilities, on a GPU: Triton kernels.

Contracts: `kernels.sampling.DeviceSamplingKernels`. `adjust` is in `adjust.py`, the search for the filters' thresholds
in `thresholds.py`. A greedy row is read once, by `find_peaks`. For a sampled row, `_sum_segment_masses` also sums the
masses of each segment from the threshold up, and `_draw` reads one segment.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.sampling import LogprobsTensors
from serve_llm.kernels.triton.adjust import adjust, apply_masks
from serve_llm.kernels.triton.thresholds import (
    DRAW_SIZE,
    MAX_COLUMNS,
    SEGMENT,
    SHIFTS,
    TILE,
    compute_masses,
    exponent_scale,
    find_floors,
    find_peaks,
    is_finite,
    load_row_max,
    to_sortable,
)

__all__ = ["adjust", "apply_masks", "log_softmax_gather", "sample"]


def sample(logits: Tensor, draws: Tensor, sampled: bool = True, filtered: bool = True) -> Tensor:
    """Same contract as `DeviceSamplingKernels.sample`."""
    logits = _check_logits(logits)
    rows, columns = logits.shape
    peaks, peak_columns, group_peaks = find_peaks(logits, grouped=sampled and filtered)
    segments = peaks.shape[1]
    floors = None if group_peaks is None else find_floors(logits, draws, peaks, group_peaks)
    masses = torch.empty(peaks.shape, dtype=torch.int64, device=logits.device) if sampled else None
    row = (logits, logits.stride(0), columns, draws, peaks, floors, masses, segments)
    sizes = {"SEGMENT": SEGMENT, "SEGMENTS": triton.next_power_of_2(segments), "SHIFT": SHIFTS[logits.dtype]}
    if sampled:
        _sum_segment_masses[(rows, segments)](*row, **sizes)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _draw[(rows,)](*row, peak_columns, chosen, **sizes)
    return chosen


def log_softmax_gather(logits: Tensor, ids: Tensor, k: int) -> LogprobsTensors:
    """Same contract as `DeviceSamplingKernels.log_softmax_gather`."""
    logits = _check_logits(logits)
    (rows, columns) = logits.shape
    device = logits.device
    k = min(k, columns)
    peaks, _, group_peaks = find_peaks(logits, grouped=k > 0)
    segments = peaks.shape[1]
    sums = torch.empty(peaks.shape, dtype=torch.float64, device=device)
    larger = torch.empty(peaks.shape, dtype=torch.int32, device=device)
    row = (logits, logits.stride(0), columns, ids, peaks, sums, larger, segments)
    padded_segments = triton.next_power_of_2(segments)
    _sum_exponentials[(rows, segments)](*row, SEGMENT=SEGMENT, SEGMENTS=padded_segments)
    logprob, log_sum = torch.empty((2, rows), dtype=torch.float64, device=device)
    rank = torch.empty(rows, dtype=torch.int64, device=device)
    _gather_logprobs[(rows,)](*row, logprob, log_sum, rank, SEGMENTS=padded_segments)
    if group_peaks is None:
        return LogprobsTensors(logprob, rank, rank.new_empty((rows, 0)), logprob.new_empty((rows, 0)))
    draws = torch.ones((rows, DRAW_SIZE.value), dtype=torch.float64, device=device)  # temperature 1, top_p 1
    draws[:, 1] = k  # top_k
    draws[:, 3] = 0.0  # min_p
    floors = find_floors(logits, draws, peaks, group_peaks)
    keys = torch.full((rows, 2 * k), -(2**63), dtype=torch.int64, device=device)
    _collect_top_k[(rows,)](
        logits, logits.stride(0), columns, floors, keys, k, SHIFT=SHIFTS[logits.dtype], TILE=TILE, num_warps=16
    )
    top_ids = (keys.topk(k, dim=1).values & 0xFFFFFFFF ^ 0xFFFFFFFF).clamp(max=columns - 1)
    return LogprobsTensors(logprob, rank, top_ids, logits.gather(1, top_ids).double() - log_sum.unsqueeze(1))


def _check_logits(logits: Tensor) -> Tensor:
    if logits.dtype not in SHIFTS or logits.shape[1] > MAX_COLUMNS:
        raise ValueError(
            f"logits must be float32, bfloat16 or float16 and have at most {MAX_COLUMNS:,} columns, "
            f"not {logits.dtype} and {logits.shape[1]:,}"
        )
    return logits if logits.stride(1) == 1 else logits.contiguous()


@triton.jit
def _load_masses(
    logits, row_stride, columns, draws, floors, row, segment, row_max, SEGMENT: tl.constexpr, SHIFT: tl.constexpr
):
    """Return the masses of a segment's columns, (SEGMENT,), 0 below the row's threshold."""
    column = segment * SEGMENT + tl.arange(0, SEGMENT)
    values = tl.load(logits + row * row_stride + column, column < columns, -float("inf")).to(tl.float32)
    masses = compute_masses(values, row_max, exponent_scale(tl.load(draws + row * DRAW_SIZE)))
    if floors is not None:
        masses = tl.where(to_sortable(values, SHIFT) >= tl.load(floors + row), masses, 0)
    return masses


@triton.jit
def _sum_segment_masses(
    logits, row_stride, columns, draws, peaks, floors, masses, segments,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    row_max = load_row_max(peaks, row, segments, SEGMENTS)
    if (tl.load(draws + row * DRAW_SIZE) > 0.0) & is_finite(row_max):
        column_masses = _load_masses(logits, row_stride, columns, draws, floors, row, segment, row_max, SEGMENT, SHIFT)
        tl.store(masses + row * segments + segment, tl.sum(column_masses, 0))


@triton.jit
def _draw(
    logits, row_stride, columns, draws, peaks, floors, masses, segments, peak_columns, chosen,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    segment_ids = tl.arange(0, SEGMENTS)
    inside = segment_ids < segments
    segment_peaks = tl.load(peaks + row * segments + segment_ids, inside, -float("inf"))
    row_max = tl.max(segment_peaks, 0)
    first_columns = tl.load(peak_columns + row * segments + segment_ids, inside, 2**31 - 1)
    token_id = tl.min(tl.where(segment_peaks == row_max, first_columns, 2**31 - 1), 0)
    if masses is not None:
        if (tl.load(draws + row * DRAW_SIZE) > 0.0) & is_finite(row_max):
            segment_masses = tl.load(masses + row * segments + segment_ids, inside, 0)
            total = tl.sum(segment_masses, 0)
            target = (tl.load(draws + row * DRAW_SIZE + 4) * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(target, total - 1)
            segment = tl.sum((tl.cumsum(segment_masses, 0) <= target).to(tl.int32), 0)
            before = tl.sum(tl.where(segment_ids < segment, segment_masses, 0), 0)
            column_masses = _load_masses(
                logits, row_stride, columns, draws, floors, row, segment, row_max, SEGMENT, SHIFT
            )
            offset = tl.sum((tl.cumsum(column_masses, 0) <= target - before).to(tl.int32), 0)
            token_id = segment * SEGMENT + offset
    tl.store(chosen + row, tl.where(is_finite(row_max), token_id, -1).to(tl.int64))


@triton.jit
def _sum_exponentials(
    logits, row_stride, columns, ids, peaks, sums, larger, segments, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr
):
    """Store each segment's sum of exp(logit - row_max), and its number of logits larger than that at the row's id."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    row_max = load_row_max(peaks, row, segments, SEGMENTS)
    if is_finite(row_max):
        column = segment * SEGMENT + tl.arange(0, SEGMENT)
        values = tl.load(logits + row * row_stride + column, column < columns, -float("inf")).to(tl.float32)
        at_id = tl.load(logits + row * row_stride + tl.maximum(tl.load(ids + row), 0)).to(tl.float32)
        tl.store(sums + row * segments + segment, tl.sum(tl.exp(values - row_max).to(tl.float64), 0))
        tl.store(larger + row * segments + segment, tl.sum((values > at_id).to(tl.int32), 0))


@triton.jit
def _gather_logprobs(
    logits, row_stride, columns, ids, peaks, sums, larger, segments, logprob, log_sum, rank, SEGMENTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    segment_ids = tl.arange(0, SEGMENTS)
    inside = segment_ids < segments
    row_max = load_row_max(peaks, row, segments, SEGMENTS)
    number = tl.zeros([], tl.int64)
    if is_finite(row_max):
        total = tl.sum(tl.load(sums + row * segments + segment_ids, inside, 0.0), 0)
        log_total = row_max.to(tl.float64) + tl.log(total)
        at_id = tl.load(logits + row * row_stride + tl.maximum(tl.load(ids + row), 0)).to(tl.float64)
        tl.store(logprob + row, at_id - log_total)
        tl.store(log_sum + row, log_total)
        number += 1 + tl.sum(tl.load(larger + row * segments + segment_ids, inside, 0), 0)
    tl.store(rank + row, number)


@triton.jit(do_not_specialize=["k"])
def _collect_top_k(logits, row_stride, columns, floors, keys, k, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Store keys of the logits from the row's threshold, its k-th largest, up.

    Those above it go into the first half of a row of keys, the first k equal ones into the second half. A larger key
    means a larger logit, or an equal one in a lower column."""
    row = tl.program_id(0).to(tl.int64)
    floor = tl.load(floors + row)
    num_above = tl.zeros([], tl.int32)
    num_equal = tl.zeros([], tl.int32)
    for start in tl.range(0, columns, TILE, num_stages=3):
        column = start + tl.arange(0, TILE)
        inside = column < columns
        values = tl.load(logits + row * row_stride + column, inside, -float("inf")).to(tl.float32)
        sortable = to_sortable(values, SHIFT)
        above = (inside & (sortable > floor)).to(tl.int32)
        equal = (inside & (sortable == floor)).to(tl.int32)
        more_above = tl.sum(above, 0)
        more_equal = tl.sum(equal, 0)
        if more_above + more_equal > 0:
            key = (sortable.to(tl.int64) << 32) | (0xFFFFFFFF - column.to(tl.int64))
            offset = num_above + tl.cumsum(above, 0) - 1
            tl.store(keys + row * 2 * k + offset, key, (above > 0) & (offset < k))
            offset = num_equal + tl.cumsum(equal, 0) - 1
            tl.store(keys + row * 2 * k + k + offset, key, (equal > 0) & (offset < k))
            num_above += more_above
            num_equal += more_equal
