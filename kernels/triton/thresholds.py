"""Find the smallest logit of each row that its filters keep, on a GPU, without sorting: Triton kernels.

A row is cut into segments with one program each, so that a single row occupies many multiprocessors.
1. `_find_peaks` finds the largest logit of each segment and of each group of GROUP columns.
2. `_bound_threshold` computes a lower bound of the threshold: for top_k, the top_k-th largest group peak; for top_p, a
   logit whose lower ones together weigh too little to matter; for min_p, the threshold itself.
3. `_collect_candidates` copies the logits from the bound up.
4. `_find_threshold` searches them for the exact threshold, or the whole row if there are more than MAX_CANDIDATES.

Weights are integer masses, so that sums are exact: they have the same bits in any order, and the cumulative sum over
segments ends exactly at the sum of the row. A weight below 2**-42 of the largest has mass 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.sampling import Draw

SEGMENT = 4096  # columns
GROUP = 64  # columns
TILE = 4096  # logits that a search loads at once
MAX_CANDIDATES = 16384  # per row, copied for the search
MAX_COLUMNS = 2**20  # the masses of a row add up to less than 2**63
SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # low bits of float32 that the dtype does not use
DRAW_SIZE = tl.constexpr(len(Draw._fields))  # columns of draws
LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST_MASS = tl.constexpr(2.0**42)  # per column


@triton.jit
def load_row_max(peaks, row, segments, SEGMENTS: tl.constexpr):
    """Return a row's largest logit, infinity if one is NaN."""
    parts = tl.arange(0, SEGMENTS)
    return tl.max(tl.load(peaks + row * segments + parts, parts < segments, -float("inf")), 0)


@triton.jit
def is_finite(number):
    return (number > -float("inf")) & (number < float("inf"))


@triton.jit
def to_sortable(values, SHIFT: tl.constexpr):
    """Map float32 values to integers in the same order: their bits, with those of negative values inverted.

    SHIFT: number of lowest bits to drop, which are constant for values of a smaller dtype."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # + 0.0 turns -0 into 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def sortable_floor(value, SHIFT: tl.constexpr):
    """Return the integer n for which x >= value if and only if `to_sortable(x)` >= n, for any float32 value."""
    keys = to_sortable(value, 0)
    return tl.where(keys < 0, keys, keys + ((1 << SHIFT) - 1)) >> SHIFT


@triton.jit
def exponent_scale(temperature):
    """Return the factor that converts a difference of logits to an exponent of 2."""
    return (1.0 / temperature * LOG2_E).to(tl.float32)


@triton.jit
def compute_masses(values, row_max, scale):
    """Return exp((value - row_max) / temperature) in units of 2**-42, int64. scale: from `exponent_scale`."""
    return (tl.exp2((values - row_max) * scale) * LARGEST_MASS).to(tl.int64)


@triton.jit
def sum_masses(source, count, floor, row_max, scale, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Return the mass of all values with a sortable key of at least `floor`."""
    masses = tl.zeros([TILE], tl.int64)
    for start in tl.range(0, count, TILE, num_stages=3):
        offsets = start + tl.arange(0, TILE)
        values = tl.load(source + offsets, offsets < count, -float("inf")).to(tl.float32)
        masses += tl.where(to_sortable(values, SHIFT) >= floor, compute_masses(values, row_max, scale), 0)
    return tl.sum(masses, 0)


@triton.jit
def search_threshold(
    source, count, low, high, wanted, row_max, scale, MASS: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr
):
    """Return the largest key in low .. high for which the values from it up number, or with MASS weigh, >= `wanted`.

    The caller guarantees this for `low`. Each round tests three keys, which cuts the interval to a quarter.
    """
    while low < high:
        quarter = (high - low + 3) // 4
        first = low + quarter
        second = tl.minimum(first + quarter, high)
        third = tl.minimum(second + quarter, high)
        if MASS:
            above_first = tl.zeros([TILE], tl.int64)
        else:
            above_first = tl.zeros([TILE], tl.int32)
        above_second = above_first
        above_third = above_first
        for start in tl.range(0, count, TILE, num_stages=3):
            offsets = start + tl.arange(0, TILE)
            inside = offsets < count
            values = tl.load(source + offsets, inside, -float("inf")).to(tl.float32)
            keys = to_sortable(values, SHIFT)
            if MASS:
                units = compute_masses(values, row_max, scale)
            else:
                units = inside.to(tl.int32)
            above_first += tl.where(keys >= first.to(tl.int32), units, 0)
            above_second += tl.where(keys >= second.to(tl.int32), units, 0)
            above_third += tl.where(keys >= third.to(tl.int32), units, 0)
        enough_first = tl.sum(above_first, 0) >= wanted
        enough_second = tl.sum(above_second, 0) >= wanted
        enough_third = tl.sum(above_third, 0) >= wanted
        low = tl.where(enough_third, third, tl.where(enough_second, second, tl.where(enough_first, first, low)))
        high = tl.where(
            enough_third, high, tl.where(enough_second, third - 1, tl.where(enough_first, second - 1, first - 1))
        )
    return low


def find_peaks(logits: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each segment's largest logit, infinity if one is NaN, and its first column, int32, both (rows, segments).

    If grouped, also return each group's largest logit."""
    (rows, columns) = logits.shape
    device = logits.device
    segments = triton.cdiv(columns, SEGMENT)
    peaks = torch.empty((rows, segments), dtype=torch.float32, device=device)
    peak_columns = torch.empty((rows, segments), dtype=torch.int32, device=device)
    group_peaks = torch.empty((rows, segments * (SEGMENT // GROUP)), device=device) if grouped else None
    _find_peaks[(rows, segments)](
        logits, logits.stride(0), columns, peaks, peak_columns, group_peaks, segments, SEGMENT=SEGMENT, GROUP=GROUP
    )
    return peaks, peak_columns, group_peaks


def find_floors(logits: Tensor, draws: Tensor, peaks: Tensor, group_peaks: Tensor) -> Tensor:
    """Return the sortable key of the smallest logit that each row's filters keep, (rows,) int32."""
    (rows, columns) = logits.shape
    segments = peaks.shape[1]
    device = logits.device
    floors = torch.empty(rows, dtype=torch.int32, device=device)
    counts = torch.empty_like(floors)
    candidates = torch.empty((rows, min(columns, MAX_CANDIDATES)), dtype=torch.float32, device=device)
    row = (logits, logits.stride(0), columns, draws)
    shift = SHIFTS[logits.dtype]
    padded_segments = triton.next_power_of_2(segments)
    _bound_threshold[(rows,)](
        columns, draws, peaks, group_peaks, group_peaks.shape[1], floors, counts, segments,
        SEGMENTS=padded_segments, GROUP=GROUP, SHIFT=shift, TILE=TILE, num_warps=16,
    )  # fmt: skip
    _collect_candidates[(rows, segments)](
        *row, floors, candidates, counts, candidates.shape[1], SHIFT=shift, SEGMENT=SEGMENT
    )
    _find_threshold[(rows,)](
        *row, peaks, candidates, counts, candidates.shape[1], floors, segments,
        SEGMENTS=padded_segments, SHIFT=shift, TILE=TILE, num_warps=16,
    )  # fmt: skip
    return floors


@triton.jit
def _find_peaks(
    logits, row_stride, columns, peaks, peak_columns, group_peaks, segments, SEGMENT: tl.constexpr, GROUP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    groups: tl.constexpr = SEGMENT // GROUP
    column = segment * SEGMENT + tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(logits + row * row_stride + column, column < columns, -float("inf")).to(tl.float32)
    group_maxima = tl.max(values, 1)
    if group_peaks is not None:
        tl.store(group_peaks + (row * segments + segment) * groups + tl.arange(0, groups), group_maxima)
    row_max = tl.max(group_maxima, 0)
    first = tl.min(tl.min(tl.where(values == row_max, column, 2**31 - 1), 1), 0)
    has_nan = tl.max(tl.max((values != values).to(tl.int32), 1), 0)
    tl.store(peaks + row * segments + segment, tl.where(has_nan > 0, float("inf"), row_max))
    tl.store(peak_columns + row * segments + segment, first)


@triton.jit
def _bound_threshold(
    columns, draws, peaks, group_peaks, group_stride, floors, counts, segments,
    SEGMENTS: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store a lower bound of the threshold, equal to it if min_p is the only filter."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(draws + row * DRAW_SIZE)
    top_k = tl.load(draws + row * DRAW_SIZE + 1).to(tl.int32)
    top_p = tl.load(draws + row * DRAW_SIZE + 2)
    min_p = tl.load(draws + row * DRAW_SIZE + 3)
    row_max = load_row_max(peaks, row, segments, SEGMENTS)
    lowest = sortable_floor(tl.full([], -float("inf"), tl.float32), SHIFT).to(tl.int64)
    floor = lowest
    if (temperature > 0.0) & is_finite(row_max):
        top = row_max.to(tl.float64)
        if min_p > 0.0:
            floor = sortable_floor((top + temperature * tl.log(min_p)).to(tl.float32), SHIFT).to(tl.int64)
        groups = tl.cdiv(columns, GROUP)
        if (top_k > 0) & (top_k < columns):
            if top_k <= groups:
                high = to_sortable(row_max, SHIFT).to(tl.int64)
                source = group_peaks + row * group_stride
                kth = search_threshold(source, groups, lowest, high, top_k, row_max, 0.0, False, SHIFT, TILE)
                floor = tl.maximum(floor, kth)
        elif top_p < 1.0:
            # Logits that weigh less than (1 - top_p) / columns of the largest together weigh less than 1 - top_p, so
            # the threshold is not below them. The - 1 allows for inexact weights.
            least = top + temperature * (tl.log((1.0 - top_p) / columns) - 1.0)
            floor = tl.maximum(floor, sortable_floor(least.to(tl.float32), SHIFT).to(tl.int64))
    tl.store(floors + row, floor.to(tl.int32))
    tl.store(counts + row, 0)


@triton.jit
def _has_top_k_or_top_p(draws, row):
    top_k = tl.load(draws + row * DRAW_SIZE + 1)
    top_p = tl.load(draws + row * DRAW_SIZE + 2)
    return (tl.load(draws + row * DRAW_SIZE) > 0.0) & ((top_k > 0.0) | (top_p < 1.0))


@triton.jit
def _collect_candidates(
    logits, row_stride, columns, draws, floors, candidates, counts, capacity, SHIFT: tl.constexpr, SEGMENT: tl.constexpr
):
    """Copy the logits from the floor up, in any order and up to the capacity, and count all of them."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    if _has_top_k_or_top_p(draws, row):
        column = segment * SEGMENT + tl.arange(0, SEGMENT)
        values = tl.load(logits + row * row_stride + column, column < columns, -float("inf")).to(tl.float32)
        kept = ((to_sortable(values, SHIFT) >= tl.load(floors + row)) & (column < columns)).to(tl.int32)
        number = tl.sum(kept, 0)
        if number > 0:
            place = tl.atomic_add(counts + row, number) + tl.cumsum(kept, 0) - 1
            tl.store(candidates + row * capacity + place, values, (kept > 0) & (place < capacity))


@triton.jit
def _find_threshold(
    logits, row_stride, columns, draws, peaks, candidates, counts, capacity, floors, segments,
    SEGMENTS: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    row_max = load_row_max(peaks, row, segments, SEGMENTS)
    if _has_top_k_or_top_p(draws, row) & is_finite(row_max):
        count = tl.load(counts + row)
        if count <= capacity:
            floor = _refine_threshold(
                candidates + row * capacity, count, columns, draws + row * DRAW_SIZE, floors + row, row_max, SHIFT, TILE
            )
        else:
            source = logits + row * row_stride
            floor = _refine_threshold(
                source, columns, columns, draws + row * DRAW_SIZE, floors + row, row_max, SHIFT, TILE
            )
        tl.store(floors + row, floor.to(tl.int32))


@triton.jit
def _refine_threshold(source, count, columns, draw, bound, row_max, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Return the threshold. `source` must include all values from the bound up."""
    top_k = tl.load(draw + 1).to(tl.int32)
    top_p = tl.load(draw + 2)
    scale = exponent_scale(tl.load(draw))
    high = to_sortable(row_max, SHIFT).to(tl.int64)
    floor = tl.load(bound).to(tl.int64)
    if (top_k > 0) & (top_k < columns):
        # if min_p set the bound and leaves fewer than top_k values, the bound stays
        floor = search_threshold(source, count, floor, high, top_k, row_max, scale, False, SHIFT, TILE)
    if top_p < 1.0:
        total = sum_masses(source, count, floor.to(tl.int32), row_max, scale, SHIFT, TILE)
        wanted = tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)
        floor = search_threshold(source, count, floor, high, wanted, row_max, scale, True, SHIFT, TILE)
    return floor
