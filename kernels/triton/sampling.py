"""Choosing a token of each row of logits, and log-probabilities, on a GPU: Triton kernels.

Contracts stand at `kernels.device_sampling.DeviceSampling`; `adjust` is in `adjust.py`, how the filters' thresholds are
found in `thresholds.py`. A greedy row is read once, by `_peaks`; one that is drawn a second time by `_weigh`, which
sums the weights of each segment from the threshold up, and one segment of it by `_draw`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.device_sampling import LogSoftmax
from serve_llm.kernels.triton.adjust import adjust
from serve_llm.kernels.triton.thresholds import (
    MOST_COLUMNS,
    SEGMENT,
    SHIFTS,
    TILE,
    find_floors,
    find_peaks,
    highest_of,
    inverse_of,
    is_finite,
    masses_of,
    order_of,
)

__all__ = ["adjust", "choose", "log_softmax_gather"]


def choose(logits: Tensor, draws: Tensor, sampled: bool = True, filtered: bool = True) -> Tensor:
    """Same contract as `DeviceSampling.choose`."""
    logits = _checked(logits)
    rows, columns = logits.shape
    peaks, places, group_peaks = find_peaks(logits, grouped=sampled and filtered)
    segments = peaks.shape[1]
    floors = None if group_peaks is None else find_floors(logits, draws, peaks, group_peaks)
    masses = torch.empty(peaks.shape, dtype=torch.int64, device=logits.device) if sampled else None
    row = (logits, logits.stride(0), columns, draws, peaks, floors, masses, segments)
    sizes = {"SEGMENT": SEGMENT, "SEGMENTS": triton.next_power_of_2(segments), "SHIFT": SHIFTS[logits.dtype]}
    if sampled:
        _weigh[(rows, segments)](*row, **sizes)
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _draw[(rows,)](*row, places, chosen, **sizes)
    return chosen


def log_softmax_gather(logits: Tensor, ids: Tensor, k: int) -> LogSoftmax:
    """Same contract as `DeviceSampling.log_softmax_gather`."""
    logits = _checked(logits)
    (rows, columns), device = logits.shape, logits.device
    k = min(k, columns)
    peaks, _, group_peaks = find_peaks(logits, grouped=k > 0)
    segments = peaks.shape[1]
    sums = torch.empty(peaks.shape, dtype=torch.float64, device=device)
    larger = torch.empty(peaks.shape, dtype=torch.int32, device=device)
    row = (logits, logits.stride(0), columns, ids, peaks, sums, larger, segments)
    several = triton.next_power_of_2(segments)
    _spread[(rows, segments)](*row, SEGMENT=SEGMENT, SEGMENTS=several)
    logprob, log_sum = torch.empty((2, rows), dtype=torch.float64, device=device)
    rank = torch.empty(rows, dtype=torch.int64, device=device)
    _gather[(rows,)](*row, logprob, log_sum, rank, SEGMENTS=several)
    if group_peaks is None:
        return LogSoftmax(logprob, rank, rank.new_empty((rows, 0)), logprob.new_empty((rows, 0)))
    draws = torch.ones((rows, 5), dtype=torch.float64, device=device)  # temperature and top_p are 1
    draws[:, 1], draws[:, 3] = k, 0.0
    floors = find_floors(logits, draws, peaks, group_peaks)
    keys = torch.full((rows, 2 * k), -(2**63), dtype=torch.int64, device=device)
    _take[(rows,)](
        logits, logits.stride(0), columns, floors, keys, k, SHIFT=SHIFTS[logits.dtype], TILE=TILE, num_warps=16
    )
    top_ids = (keys.topk(k, dim=1).values & 0xFFFFFFFF ^ 0xFFFFFFFF).clamp(max=columns - 1)
    return LogSoftmax(logprob, rank, top_ids, logits.gather(1, top_ids).double() - log_sum.unsqueeze(1))


def _checked(logits: Tensor) -> Tensor:
    if logits.dtype not in SHIFTS or logits.shape[1] > MOST_COLUMNS:
        raise ValueError(
            f"logits are float32, bfloat16 or float16 and have at most {MOST_COLUMNS:,} columns, "
            f"not {logits.dtype} and {logits.shape[1]:,}"
        )
    return logits if logits.stride(1) == 1 else logits.contiguous()


@triton.jit
def _masses(
    logits, row_stride, columns, draws, floors, row, segment, highest, SEGMENT: tl.constexpr, SHIFT: tl.constexpr
):
    """(SEGMENT,) the weights of a segment's columns, 0 below the row's threshold."""
    column = segment * SEGMENT + tl.arange(0, SEGMENT)
    values = tl.load(logits + row * row_stride + column, column < columns, -float("inf")).to(tl.float32)
    masses = masses_of(values, highest, inverse_of(tl.load(draws + row * 5)))
    if floors is not None:
        masses = tl.where(order_of(values, SHIFT) >= tl.load(floors + row), masses, 0)
    return masses


@triton.jit
def _weigh(
    logits, row_stride, columns, draws, peaks, floors, masses, segments,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    highest = highest_of(peaks, row, segments, SEGMENTS)
    if (tl.load(draws + row * 5) > 0.0) & is_finite(highest):
        own = _masses(logits, row_stride, columns, draws, floors, row, segment, highest, SEGMENT, SHIFT)
        tl.store(masses + row * segments + segment, tl.sum(own, 0))


@triton.jit
def _draw(
    logits, row_stride, columns, draws, peaks, floors, masses, segments, places, chosen,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, SEGMENTS)
    inside = parts < segments
    of_parts = tl.load(peaks + row * segments + parts, inside, -float("inf"))
    highest = tl.max(of_parts, 0)
    firsts = tl.load(places + row * segments + parts, inside, 2**31 - 1)
    found = tl.min(tl.where(of_parts == highest, firsts, 2**31 - 1), 0)
    if masses is not None:
        if (tl.load(draws + row * 5) > 0.0) & is_finite(highest):
            of_parts_masses = tl.load(masses + row * segments + parts, inside, 0)
            total = tl.sum(of_parts_masses, 0)
            target = (tl.load(draws + row * 5 + 4) * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(target, total - 1)
            segment = tl.sum((tl.cumsum(of_parts_masses, 0) <= target).to(tl.int32), 0)
            before = tl.sum(tl.where(parts < segment, of_parts_masses, 0), 0)
            own = _masses(logits, row_stride, columns, draws, floors, row, segment, highest, SEGMENT, SHIFT)
            place = tl.sum((tl.cumsum(own, 0) <= target - before).to(tl.int32), 0)
            found = segment * SEGMENT + place
    tl.store(chosen + row, tl.where(is_finite(highest), found, -1).to(tl.int64))


@triton.jit
def _spread(
    logits, row_stride, columns, ids, peaks, sums, larger, segments, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr
):
    """Of each segment the sum of exp(logit - highest), and the number of logits larger than that at the row's id."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    highest = highest_of(peaks, row, segments, SEGMENTS)
    if is_finite(highest):
        column = segment * SEGMENT + tl.arange(0, SEGMENT)
        values = tl.load(logits + row * row_stride + column, column < columns, -float("inf")).to(tl.float32)
        at_id = tl.load(logits + row * row_stride + tl.maximum(tl.load(ids + row), 0)).to(tl.float32)
        tl.store(sums + row * segments + segment, tl.sum(tl.exp(values - highest).to(tl.float64), 0))
        tl.store(larger + row * segments + segment, tl.sum((values > at_id).to(tl.int32), 0))


@triton.jit
def _gather(
    logits, row_stride, columns, ids, peaks, sums, larger, segments, logprob, log_sum, rank, SEGMENTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, SEGMENTS)
    inside = parts < segments
    highest = highest_of(peaks, row, segments, SEGMENTS)
    number = tl.zeros([], tl.int64)
    if is_finite(highest):
        total = tl.sum(tl.load(sums + row * segments + parts, inside, 0.0), 0)
        log_total = highest.to(tl.float64) + tl.log(total)
        at_id = tl.load(logits + row * row_stride + tl.maximum(tl.load(ids + row), 0)).to(tl.float64)
        tl.store(logprob + row, at_id - log_total)
        tl.store(log_sum + row, log_total)
        number += 1 + tl.sum(tl.load(larger + row * segments + parts, inside, 0), 0)
    tl.store(rank + row, number)


@triton.jit
def _take(logits, row_stride, columns, floors, keys, k, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Of the logits from a row's threshold, the k-th largest, up: those above it into the first half of a row of keys,
    the first k equal to it into the other half. Larger keys are larger logits, or equal ones of lower columns."""
    row = tl.program_id(0).to(tl.int64)
    floor = tl.load(floors + row)
    num_above, num_equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in tl.range(0, columns, TILE, num_stages=3):
        column = start + tl.arange(0, TILE)
        inside = column < columns
        values = tl.load(logits + row * row_stride + column, inside, -float("inf")).to(tl.float32)
        order = order_of(values, SHIFT)
        above, equal = (inside & (order > floor)).to(tl.int32), (inside & (order == floor)).to(tl.int32)
        more_above, more_equal = tl.sum(above, 0), tl.sum(equal, 0)
        if more_above + more_equal > 0:
            key = (order.to(tl.int64) << 32) | (0xFFFFFFFF - column.to(tl.int64))
            place = num_above + tl.cumsum(above, 0) - 1
            tl.store(keys + row * 2 * k + place, key, (above > 0) & (place < k))
            place = num_equal + tl.cumsum(equal, 0) - 1
            tl.store(keys + row * 2 * k + k + place, key, (equal > 0) & (place < k))
            num_above += more_above
            num_equal += more_equal
