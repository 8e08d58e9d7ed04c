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
        y = x.new_empty((x.shape[0], self.weight.shape[0]))
        _multiply(x.contiguous().unsqueeze(1), self.weight.unsqueeze(0), self.bias, y.unsqueeze(1))
        return y


def pack_heads(weight: Tensor) -> Linear:
    """See `kernels.linear.pack_heads`; for weights on a GPU. A row's result depends on that row alone."""
    weight = weight.contiguous()

    def each_head(x: Tensor) -> Tensor:
        y = x.new_empty((x.shape[0], *weight.shape[:2]))
        _multiply(x if x.stride(2) == 1 else x.contiguous(), weight, None, y)
        return y

    return each_head


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """x: (rows, heads, inputs), weight: (heads, outputs, inputs) dense -> y: (rows, heads, outputs)."""
    if y.numel() == 0:
        return
    heads, outputs, inputs = weight.shape
    columns = block_columns(heads * outputs, x.element_size())
    grid = (triton.cdiv(len(x), BLOCK_ROWS), triton.cdiv(outputs, columns), heads)
    _linear[grid](
        *(x, weight, bias, y, len(x), outputs, inputs, *x.stride()[:2], *y.stride()[:2]),
        *(BLOCK_ROWS, columns, BLOCK_INPUTS if x.element_size() == 2 else BLOCK_INPUTS // 2),
        num_warps=4,
        num_stages=4 if x.element_size() == 2 else 3,
    )


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
    x_row,
    x_head,
    y_row,
    y_head,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """One tile of y, of one head. Programs that follow each other share their columns, so that a weight is read from
    memory once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    head = tl.program_id(2).to(tl.int64)
    step = tl.arange(0, BLOCK_INPUTS)
    x_rows = x + head * x_head + row.to(tl.int64)[:, None] * x_row
    weight_rows = weight + (head * outputs + column)[None, :] * inputs
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, inputs, BLOCK_INPUTS):
        at = start + step
        left = tl.load(x_rows + at[None, :], mask=(row < rows)[:, None] & (at < inputs)[None, :], other=0.0)
        right = tl.load(weight_rows + at[:, None], mask=(column < outputs)[None, :] & (at < inputs)[:, None], other=0.0)
        total = dot(left, right, total)
    if bias is not None:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < outputs)[None, :]
    places = y + head * y_head + row.to(tl.int64)[:, None] * y_row + column[None, :]
    tl.store(places, total.to(y.dtype.element_ty), mask=inside)
