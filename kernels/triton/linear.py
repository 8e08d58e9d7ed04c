"""Linear layers whose rows do not depend on the number of rows. cuBLAS does not promise that: it takes another kernel
for another size.

One tile shape for each weight, whatever the input, and one order of each sum: over blocks of inputs, from the first to
the last. A small weight is cut into narrow tiles, since at few rows there are as many programs as tiles, and it takes
more than a hundred of them to read at a GPU's full speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.linear import Linear
from serve_llm.kernels.triton.product import dot

BLOCK_ROWS = 64  # the least that Hopper's matrix units take at a time
BLOCK_INPUTS = 64
PROGRAMS = 128  # that a weight is cut into, if it has the columns


def pack(weight: Tensor, bias: Tensor | None = None, beside: Sequence[Tensor] = ()) -> Linear:
    """See `kernels.linear.pack`; for weights on a GPU. A row's result depends on that row alone."""
    return Invariant(torch.cat((weight, *beside)) if beside else weight.contiguous(), bias)


@dataclass(frozen=True)
class Invariant:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        (rows, inputs), outputs = x.shape, self.weight.shape[0]
        y = x.new_empty((rows, outputs))
        if y.numel() == 0:
            return y
        columns = block_columns(outputs, x.element_size())
        grid = (triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(outputs, columns))
        _linear[grid](
            *(x, self.weight, self.bias, y, rows, outputs, inputs),
            *(BLOCK_ROWS, columns, BLOCK_INPUTS if x.element_size() == 2 else BLOCK_INPUTS // 2),
            num_warps=4,
            num_stages=4 if x.element_size() == 2 else 3,
        )
        return y


def block_columns(outputs: int, element_bytes: int) -> int:
    """Columns of a tile: a power of two that gives at least PROGRAMS tiles, between 16 and 128 (64 of float32)."""
    wanted = max(outputs // PROGRAMS, 1)
    return min(max(16, 1 << (wanted.bit_length() - 1)), 128 if element_bytes == 2 else 64)


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    bias,
    y,
    rows,
    outputs,
    inputs,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """One tile of y. Programs that follow each other share their columns, so that a weight is read from memory once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    step = tl.arange(0, BLOCK_INPUTS)
    x_rows = x + row.to(tl.int64)[:, None] * inputs
    weight_rows = weight + column.to(tl.int64)[None, :] * inputs
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, inputs, BLOCK_INPUTS):
        at = start + step
        left = tl.load(x_rows + at[None, :], mask=(row < rows)[:, None] & (at < inputs)[None, :], other=0.0)
        right = tl.load(weight_rows + at[:, None], mask=(column < outputs)[None, :] & (at < inputs)[:, None], other=0.0)
        total = dot(left, right, total)
    if bias is not None:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < outputs)[None, :]
    tl.store(y + row.to(tl.int64)[:, None] * outputs + column[None, :], total.to(y.dtype.element_ty), mask=inside)
