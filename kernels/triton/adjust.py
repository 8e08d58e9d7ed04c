"""Add biases, bans and penalties to rows of logits in one Triton launch.

Contract: `kernels.sampling.DeviceSamplingKernels.adjust`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.sampling import BANNED, REPEATED, SPAN_COLUMNS, LogitAdjustments

MASK_COLUMNS = 2048  # columns per program


def adjust(scores: Tensor, adjustments: LogitAdjustments) -> None:
    """Same contract as `DeviceSamplingKernels.adjust`."""
    if len(adjustments.spans):
        _adjust[(len(adjustments.spans),)](
            scores,
            scores.stride(0),
            adjustments.entries,
            adjustments.spans,
            COLUMNS=SPAN_COLUMNS,
            BANNED=BANNED,
            REPEATED=REPEATED,
        )


def apply_masks(scores: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Same contract as `DeviceSamplingKernels.apply_masks`."""
    columns = scores.shape[1]
    grid = (len(rows), triton.cdiv(columns, MASK_COLUMNS))
    _apply_masks[grid](scores, scores.stride(0), rows, masks, masks.stride(0), columns, SIZE=MASK_COLUMNS)


@triton.jit
def _apply_masks(scores, row_stride, rows, masks, mask_stride, columns, SIZE: tl.constexpr):
    number = tl.program_id(0)
    row = scores + tl.load(rows + number) * row_stride
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < columns
    words = tl.load(masks + number.to(tl.int64) * mask_stride + column // 32, inside, 0)
    is_banned = ((words >> (column % 32)) & 1) == 0
    tl.store(row + column, -float("inf"), inside & is_banned)


@triton.jit
def _adjust(scores, row_stride, entries, spans, COLUMNS: tl.constexpr, BANNED: tl.constexpr, REPEATED: tl.constexpr):
    span = spans + tl.program_id(0) * 6
    row = scores + tl.load(span).to(tl.int64) * row_stride
    offsets = tl.arange(0, COLUMNS)
    entry_index = tl.load(span + 1) + offsets
    mask = entry_index < tl.load(span + 2)
    repetition = tl.load(span + 3).to(tl.float32, bitcast=True)
    begin = tl.load(span + 4)
    end = tl.load(span + 5)

    entry = entries + entry_index.to(tl.int64) * 4
    column = tl.load(entry, mask, 0)
    bias = tl.load(entry + 1, mask, 0).to(tl.float32, bitcast=True)
    flags = tl.load(entry + 2, mask, 0)
    penalty = tl.load(entry + 3, mask, 0).to(tl.float32, bitcast=True)
    values = tl.load(row + column, mask, 0.0) + bias
    values = tl.where((flags & BANNED) > 0, -float("inf"), values)
    repeated = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
    values = tl.where((flags & REPEATED) > 0, repeated, values) - penalty
    if end > begin:
        tl.debug_barrier()  # every thread has read its values
        tl.store(row + begin + offsets, -float("inf"), begin + offsets < end)
        tl.debug_barrier()
    tl.store(row + column, values, mask)
