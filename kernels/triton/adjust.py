"""Bias, bans and penalties on rows of logits in one launch: a Triton kernel.

The contract stands at `kernels.device_sampling.DeviceSampling.adjust`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.device_sampling import BANNED, EDIT_COLUMNS, REPEATED, Edits


def adjust(scores: Tensor, edits: Edits) -> None:
    """Same contract as `DeviceSampling.adjust`."""
    if len(edits.spans):
        _adjust[(len(edits.spans),)](
            scores, scores.stride(0), edits.entries, edits.spans, SIZE=EDIT_COLUMNS, BANNED=BANNED, REPEATED=REPEATED
        )


@triton.jit
def _adjust(scores, row_stride, entries, spans, SIZE: tl.constexpr, BANNED: tl.constexpr, REPEATED: tl.constexpr):
    span = spans + tl.program_id(0) * 6
    row = scores + tl.load(span).to(tl.int64) * row_stride
    places = tl.arange(0, SIZE)
    number = tl.load(span + 1) + places
    inside = number < tl.load(span + 2)
    repetition = tl.load(span + 3).to(tl.float32, bitcast=True)
    begin, end = tl.load(span + 4), tl.load(span + 5)

    entry = entries + number.to(tl.int64) * 4
    column = tl.load(entry, inside, 0)
    bias = tl.load(entry + 1, inside, 0).to(tl.float32, bitcast=True)
    flags = tl.load(entry + 2, inside, 0)
    penalty = tl.load(entry + 3, inside, 0).to(tl.float32, bitcast=True)
    values = tl.load(row + column, inside, 0.0) + bias
    values = tl.where((flags & BANNED) > 0, -float("inf"), values)
    repeated = tl.where(values > 0.0, tl.div_rn(values, repetition), values * repetition)
    values = tl.where((flags & REPEATED) > 0, repeated, values) - penalty
    if end > begin:
        tl.debug_barrier()  # all have read
        tl.store(row + begin + places, -float("inf"), begin + places < end)
        tl.debug_barrier()
    tl.store(row + column, values, inside)
