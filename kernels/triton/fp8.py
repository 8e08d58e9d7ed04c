"""Quantise rows to 8-bit floating point, in Triton. Contract: `kernels.linear_fp8.quantise_rows`.

One program holds one row, so the row is read once and its bits depend on that row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.linear_fp8 import LARGEST, SMALLEST_ROW
from serve_llm.kernels.triton.norm import dense_rows, row_sizes


def quantise_rows(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    rows = dense_rows(x)
    numbers = torch.empty((x.shape[0], width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    if x.shape[0]:
        _quantise_rows[(x.shape[0],)](
            rows,
            numbers,
            scales,
            rows.stride(0),
            INPUTS=x.shape[1],
            LARGEST=LARGEST,
            SMALLEST=SMALLEST_ROW,
            **row_sizes(width),
        )
    return numbers, scales


@triton.jit
def _quantise_rows(
    x,
    numbers,
    scales,
    x_row,
    INPUTS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    wide = tl.load(x + row * x_row + column, mask=column < INPUTS, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), 0), SMALLEST)
    number = (wide * tl.div_rn(LARGEST, largest)).to(tl.float8e4nv)
    tl.store(numbers + row * WIDTH + column, number, mask=column < WIDTH)
    tl.store(scales + row, tl.div_rn(largest, LARGEST))
