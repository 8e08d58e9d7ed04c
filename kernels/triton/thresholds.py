"""The smallest logit of each row that its filters keep, on a GPU, without sorting: Triton kernels.

A row is cut into segments, one program each, so that a single row occupies many processors.
1. `_peaks` finds the largest logit of each segment and of each group of GROUP columns.
2. `_bound` finds a floor that the threshold cannot be below: for top_k the top_k-th largest peak of a group; for top_p
   what weighs so little that all of it together cannot matter; for min_p the threshold itself.
3. `_collect` copies the few logits from there up.
4. `_threshold` searches them for the exact threshold; or the row itself, where they are more than FEW.

Weights are integers so that sums are exact: one sum in any order gives the same bits, and a cumulative sum over parts
of a row ends exactly where the sum of the row does. A weight below 2**-42 of the largest counts as nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENT = 4096  # columns
GROUP = 64  # columns
TILE = 4096  # numbers that a search looks at together
FEW = 16384  # numbers of a row that are copied for the search
MOST_COLUMNS = 2**20  # the masses of as many sum up to less than 2**63
SHIFTS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # low bits in which all numbers of a type agree
LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST_MASS = tl.constexpr(2.0**42)  # of one column


@triton.jit
def highest_of(peaks, row, segments, SEGMENTS: tl.constexpr):
    """A row's largest logit, infinity where one is NaN."""
    parts = tl.arange(0, SEGMENTS)
    return tl.max(tl.load(peaks + row * segments + parts, parts < segments, -float("inf")), 0)


@triton.jit
def is_finite(number):
    return (number > -float("inf")) & (number < float("inf"))


@triton.jit
def order_of(values, SHIFT: tl.constexpr):
    """Integers in the order of float32 values: their bits, those of negative numbers turned round. SHIFT: as many of
    the lowest bits tell nothing, since the values were of a smaller type."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # + 0.0 makes 0 of -0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def floor_of(value, SHIFT: tl.constexpr):
    """The integer such that x >= value exactly where `order_of(x)` is at least this, for any float32 value."""
    order = order_of(value, 0)
    return tl.where(order < 0, order, order + ((1 << SHIFT) - 1)) >> SHIFT


@triton.jit
def inverse_of(temperature):
    """What turns a difference of logits into a power of two."""
    return (1.0 / temperature * LOG2_E).to(tl.float32)


@triton.jit
def masses_of(values, highest, inverse):
    """int64 weights exp((value - highest) / temperature), in units of 2**-42; inverse: of `inverse_of`."""
    return (tl.exp2((values - highest) * inverse) * LARGEST_MASS).to(tl.int64)


@triton.jit
def sum_from(source, count, floor, highest, inverse, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """The mass of all values whose order is at least `floor`."""
    found = tl.zeros([TILE], tl.int64)
    for start in tl.range(0, count, TILE, num_stages=3):
        places = start + tl.arange(0, TILE)
        values = tl.load(source + places, places < count, -float("inf")).to(tl.float32)
        found += tl.where(order_of(values, SHIFT) >= floor, masses_of(values, highest, inverse), 0)
    return tl.sum(found, 0)


@triton.jit
def search(
    source, count, low, high, wanted, highest, inverse, MASS: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr
):
    """The largest order of low .. high such that the values from it up are `wanted` or more; with MASS, weigh so much.

    It is known to be true of `low`. Each round looks at three places of the interval, which quarters it.
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
            places = start + tl.arange(0, TILE)
            inside = places < count
            values = tl.load(source + places, inside, -float("inf")).to(tl.float32)
            order = order_of(values, SHIFT)
            if MASS:
                units = masses_of(values, highest, inverse)
            else:
                units = inside.to(tl.int32)
            above_first += tl.where(order >= first.to(tl.int32), units, 0)
            above_second += tl.where(order >= second.to(tl.int32), units, 0)
            above_third += tl.where(order >= third.to(tl.int32), units, 0)
        enough_first = tl.sum(above_first, 0) >= wanted
        enough_second = tl.sum(above_second, 0) >= wanted
        enough_third = tl.sum(above_third, 0) >= wanted
        low = tl.where(enough_third, third, tl.where(enough_second, second, tl.where(enough_first, first, low)))
        high = tl.where(
            enough_third, high, tl.where(enough_second, third - 1, tl.where(enough_first, second - 1, first - 1))
        )
    return low


def find_peaks(logits: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(rows, segments) each segment's largest logit, infinity where one is NaN, and its first column, int32; if
    grouped, each group's largest logit."""
    (rows, columns), device = logits.shape, logits.device
    segments = triton.cdiv(columns, SEGMENT)
    peaks = torch.empty((rows, segments), dtype=torch.float32, device=device)
    places = torch.empty((rows, segments), dtype=torch.int32, device=device)
    group_peaks = torch.empty((rows, segments * (SEGMENT // GROUP)), device=device) if grouped else None
    _peaks[(rows, segments)](
        logits, logits.stride(0), columns, peaks, places, group_peaks, segments, SEGMENT=SEGMENT, GROUP=GROUP
    )
    return peaks, places, group_peaks


def find_floors(logits: Tensor, draws: Tensor, peaks: Tensor, group_peaks: Tensor) -> Tensor:
    """(rows,) int32: the order (`order_of`) of the smallest logit that each row's filters keep."""
    (rows, columns), segments, device = logits.shape, peaks.shape[1], logits.device
    floors = torch.empty(rows, dtype=torch.int32, device=device)
    counts = torch.empty_like(floors)
    found = torch.empty((rows, min(columns, FEW)), dtype=torch.float32, device=device)
    row = (logits, logits.stride(0), columns, draws)
    shift = SHIFTS[logits.dtype]
    several = triton.next_power_of_2(segments)
    _bound[(rows,)](
        columns, draws, peaks, group_peaks, group_peaks.shape[1], floors, counts, segments,
        SEGMENTS=several, GROUP=GROUP, SHIFT=shift, TILE=TILE, num_warps=16,
    )  # fmt: skip
    _collect[(rows, segments)](*row, floors, found, counts, found.shape[1], SHIFT=shift, SEGMENT=SEGMENT)
    _threshold[(rows,)](
        *row, peaks, found, counts, found.shape[1], floors, segments,
        SEGMENTS=several, SHIFT=shift, TILE=TILE, num_warps=16,
    )  # fmt: skip
    return floors


@triton.jit
def _peaks(
    logits, row_stride, columns, peaks, places, group_peaks, segments, SEGMENT: tl.constexpr, GROUP: tl.constexpr
):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups: tl.constexpr = SEGMENT // GROUP
    column = segment * SEGMENT + tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(logits + row * row_stride + column, column < columns, -float("inf")).to(tl.float32)
    of_groups = tl.max(values, 1)
    if group_peaks is not None:
        tl.store(group_peaks + (row * segments + segment) * groups + tl.arange(0, groups), of_groups)
    highest = tl.max(of_groups, 0)
    first = tl.min(tl.min(tl.where(values == highest, column, 2**31 - 1), 1), 0)
    has_nan = tl.max(tl.max((values != values).to(tl.int32), 1), 0)
    tl.store(peaks + row * segments + segment, tl.where(has_nan > 0, float("inf"), highest))
    tl.store(places + row * segments + segment, first)


@triton.jit
def _bound(
    columns, draws, peaks, group_peaks, group_stride, floors, counts, segments,
    SEGMENTS: tl.constexpr, GROUP: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A floor that is at most the threshold, and is the threshold where min_p is the only filter."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(draws + row * 5)
    top_k = tl.load(draws + row * 5 + 1).to(tl.int32)
    top_p = tl.load(draws + row * 5 + 2)
    min_p = tl.load(draws + row * 5 + 3)
    highest = highest_of(peaks, row, segments, SEGMENTS)
    lowest = floor_of(tl.full([], -float("inf"), tl.float32), SHIFT).to(tl.int64)
    floor = lowest
    if (temperature > 0.0) & is_finite(highest):
        top = highest.to(tl.float64)
        if min_p > 0.0:
            floor = floor_of((top + temperature * tl.log(min_p)).to(tl.float32), SHIFT).to(tl.int64)
        groups = tl.cdiv(columns, GROUP)
        if (top_k > 0) & (top_k < columns):
            if top_k <= groups:
                high = order_of(highest, SHIFT).to(tl.int64)
                source = group_peaks + row * group_stride
                kth = search(source, groups, lowest, high, top_k, highest, 0.0, False, SHIFT, TILE)
                floor = tl.maximum(floor, kth)
        elif top_p < 1.0:
            # What weighs less than (1 - top_p) / columns of the largest weight together weighs less than the share
            # 1 - top_p, so the threshold is not below it; nor is it below a third of that, if weights are not exact.
            least = top + temperature * (tl.log((1.0 - top_p) / columns) - 1.0)
            floor = tl.maximum(floor, floor_of(least.to(tl.float32), SHIFT).to(tl.int64))
    tl.store(floors + row, floor.to(tl.int32))
    tl.store(counts + row, 0)


@triton.jit
def _is_searched(draws, row):
    top_k, top_p = tl.load(draws + row * 5 + 1), tl.load(draws + row * 5 + 2)
    return (tl.load(draws + row * 5) > 0.0) & ((top_k > 0.0) | (top_p < 1.0))


@triton.jit
def _collect(
    logits, row_stride, columns, draws, floors, found, counts, room, SHIFT: tl.constexpr, SEGMENT: tl.constexpr
):
    """Copy what is not below the floor, in any order, and count it; of more than there is room for, some."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if _is_searched(draws, row):
        column = segment * SEGMENT + tl.arange(0, SEGMENT)
        values = tl.load(logits + row * row_stride + column, column < columns, -float("inf")).to(tl.float32)
        kept = ((order_of(values, SHIFT) >= tl.load(floors + row)) & (column < columns)).to(tl.int32)
        number = tl.sum(kept, 0)
        if number > 0:
            place = tl.atomic_add(counts + row, number) + tl.cumsum(kept, 0) - 1
            tl.store(found + row * room + place, values, (kept > 0) & (place < room))


@triton.jit
def _threshold(
    logits, row_stride, columns, draws, peaks, found, counts, room, floors, segments,
    SEGMENTS: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    highest = highest_of(peaks, row, segments, SEGMENTS)
    if _is_searched(draws, row) & is_finite(highest):
        count = tl.load(counts + row)
        if count <= room:
            floor = _refined(found + row * room, count, columns, draws + row * 5, floors + row, highest, SHIFT, TILE)
        else:
            source = logits + row * row_stride
            floor = _refined(source, columns, columns, draws + row * 5, floors + row, highest, SHIFT, TILE)
        tl.store(floors + row, floor.to(tl.int32))


@triton.jit
def _refined(source, count, columns, draw, bound, highest, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """The threshold, from values among which are all that are not below the bound."""
    top_k, top_p = tl.load(draw + 1).to(tl.int32), tl.load(draw + 2)
    inverse = inverse_of(tl.load(draw))
    high = order_of(highest, SHIFT).to(tl.int64)
    floor = tl.load(bound).to(tl.int64)
    if (top_k > 0) & (top_k < columns):
        # the bound may be min_p's, and fewer than top_k above it: then it stays
        floor = search(source, count, floor, high, top_k, highest, inverse, False, SHIFT, TILE)
    if top_p < 1.0:
        total = sum_from(source, count, floor.to(tl.int32), highest, inverse, SHIFT, TILE)
        wanted = tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)
        floor = search(source, count, floor, high, wanted, highest, inverse, True, SHIFT, TILE)
    return floor
