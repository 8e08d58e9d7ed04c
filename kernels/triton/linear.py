"""Batch-invariant linear layers: a row's result does not depend on the number of rows.

cuBLAS does not guarantee this, since it chooses a kernel by size. Here a weight has one tile shape for every input, and
each sum runs over the blocks of inputs from first to last. Small weights get narrow tiles: with few rows there is one
program per tile, and a GPU needs more than a hundred programs to read at full speed.
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

BLOCK_ROWS = 64  # the smallest that Hopper's tensor cores take
BLOCK_INPUTS = 64
MIN_PROGRAMS = 128  # tiles of a weight, if it has enough outputs


def pack(weight: Tensor, bias: Tensor | None = None, merged: Sequence[Tensor] = ()) -> Linear:
    """See `kernels.linear.pack`; for weights on a GPU. A row's result depends on that row alone."""
    return BatchInvariantLinear(torch.cat((weight, *merged)) if merged else weight.contiguous(), bias)


@dataclass(frozen=True)
class BatchInvariantLinear:
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
    block_width = choose_block_width(heads * outputs, x.element_size())
    grid = (triton.cdiv(len(x), BLOCK_ROWS), triton.cdiv(outputs, block_width), heads)
    _linear[grid](
        x,
        weight,
        bias,
        y,
        len(x),
        outputs,
        inputs,
        x.stride(0),
        x.stride(1),
        y.stride(0),
        y.stride(1),
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLUMNS=block_width,
        BLOCK_INPUTS=BLOCK_INPUTS if x.element_size() == 2 else BLOCK_INPUTS // 2,
        num_warps=4,
        num_stages=4 if x.element_size() == 2 else 3,
    )


def choose_block_width(outputs: int, element_bytes: int) -> int:
    """Return the outputs per tile: a power of two, 16 to 128 (64 in float32), that gives at least MIN_PROGRAMS
    tiles."""
    wanted = max(outputs // MIN_PROGRAMS, 1)
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
    """Compute one tile of y for one head. Consecutive programs share their columns, so that weights are read once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    head = tl.program_id(2).to(tl.int64)
    step = tl.arange(0, BLOCK_INPUTS)
    x_rows = x + head * x_head + row.to(tl.int64)[:, None] * x_row
    weight_rows = weight + (head * outputs + column)[None, :] * inputs
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, inputs, BLOCK_INPUTS):
        depth = start + step
        left = tl.load(x_rows + depth[None, :], mask=(row < rows)[:, None] & (depth < inputs)[None, :], other=0.0)
        right = tl.load(
            weight_rows + depth[:, None], mask=(column < outputs)[None, :] & (depth < inputs)[:, None], other=0.0
        )
        total = dot(left, right, total)
    if bias is not None:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    mask = (row < rows)[:, None] & (column < outputs)[None, :]
    target = y + head * y_head + row.to(tl.int64)[:, None] * y_row + column[None, :]
    tl.store(target, total.to(y.dtype.element_ty), mask=mask)
