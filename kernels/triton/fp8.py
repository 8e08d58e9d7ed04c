"""Quantise rows, and blocks of rows, to 8-bit floating point, in Triton. Contracts:
`kernels.linear_fp8.quantise_rows` and `kernels.linear_fp8_blocks.quantise_blocks`.

One program holds one row, or some blocks of one, so each number is read once and its bits depend on its row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.linear_fp8 import DTYPE, LARGEST, SMALLEST_ROW
from serve_llm.kernels.linear_fp8_blocks import BLOCK, SCALES
from serve_llm.kernels.triton.norm import dense_rows, row_sizes

BLOCKS = 16  # that a program computes: each thread of 4 warps holds 16 numbers, the bytes of one store


def quantise_rows(x: Tensor, width: int, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    rows = dense_rows(x)
    numbers = torch.empty((x.shape[0], width), dtype=DTYPE, device=x.device)
    scales = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    if x.shape[0]:
        _quantise_rows[(x.shape[0],)](
            rows,
            numbers,
            scales,
            input_scale,
            rows.stride(0),
            INPUTS=x.shape[1],
            LARGEST=LARGEST,
            SMALLEST=SMALLEST_ROW,
            **row_sizes(width),
        )
    return numbers, scales


def quantise_blocks(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    rows = dense_rows(x)
    padded_rows = triton.cdiv(x.shape[0], SCALES) * SCALES
    numbers = torch.empty((padded_rows, width), dtype=DTYPE, device=x.device)
    scales = torch.empty((width // BLOCK, padded_rows), dtype=torch.float32, device=x.device)
    if padded_rows:
        _quantise_blocks[(padded_rows, triton.cdiv(width, BLOCKS * BLOCK))](
            rows,
            numbers,
            scales,
            x.shape[0],
            padded_rows,
            rows.stride(0),
            INPUTS=x.shape[1],
            LARGEST=LARGEST,
            SMALLEST=SMALLEST_ROW,
            WIDTH=width,
            BLOCKS=BLOCKS,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return numbers, scales.t()


@triton.jit
def _quantise_rows(
    x,
    numbers,
    scales,
    input_scale,
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
    if input_scale is not None:
        scale = tl.load(input_scale)
        number = tl.clamp(wide * tl.div_rn(1.0, scale), -LARGEST, LARGEST)
        number = tl.where(tl.abs(wide) < float("inf"), number, float("nan"))
    else:
        largest = tl.maximum(tl.max(tl.abs(wide), 0), SMALLEST)
        scale = tl.div_rn(largest, LARGEST)
        number = wide * tl.div_rn(LARGEST, largest)
    tl.store(numbers + row * WIDTH + column, number.to(tl.float8e4nv), mask=column < WIDTH)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["rows", "padded_rows"])
def _quantise_blocks(
    x,
    numbers,
    scales,
    rows,
    padded_rows,
    x_row,
    INPUTS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise some blocks of a row, or write zeros after the last row."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    wide = tl.load(x + row * x_row + column, mask=(column < INPUTS) & (row < rows), other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(wide), 1), SMALLEST)
    number = wide * tl.div_rn(tl.full((BLOCKS,), LARGEST, tl.float32), largest)[:, None]
    tl.store(numbers + row * WIDTH + column, number.to(tl.float8e4nv), mask=column < WIDTH)
    scale = tl.div_rn(largest, tl.full((BLOCKS,), LARGEST, tl.float32))
    tl.store(scales + block.to(tl.int64) * padded_rows + row, scale, mask=block * BLOCK < WIDTH)
