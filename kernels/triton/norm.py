"""Norms of rows, in Triton. Contracts: the functions of the same names in `kernels/norm.py`.

One program holds one row in registers, so the row is read and written once and its bits depend on that row alone. In
rows of up to 8192 elements a thread holds 8 of them, so that a load of a 16-bit type has 16 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS_PER_THREAD = 8


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = dense_rows(x)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _rms_norm[(rows.shape[0],)](
            rows, rows, weight, normed, eps, rows.stride(0), ADD=False, **row_sizes(rows.shape[1])
        )
    return normed


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    hidden = dense_rows(hidden)
    total = delta.contiguous()
    normed = torch.empty_like(total)
    if hidden.numel():
        _rms_norm[(hidden.shape[0],)](
            hidden, total, weight, normed, eps, hidden.stride(0), ADD=True, **row_sizes(hidden.shape[1])
        )
    return total, normed


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    rows = dense_rows(x)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        _layer_norm[(rows.shape[0],)](rows, weight, bias, normed, eps, rows.stride(0), **row_sizes(rows.shape[1]))
    return normed


def add_layer_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = hidden + delta
    return total, layer_norm(total, weight, bias, eps)


def dense_rows(x: Tensor) -> Tensor:
    """Return x as (rows, width) with dense rows, copied only if necessary."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def row_sizes(width: int) -> dict[str, int]:
    """Return the compile-time sizes of a program that holds a whole row of `width` elements."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(max(block // (32 * ELEMENTS_PER_THREAD), 1), 32)}


@triton.jit
def _rms_norm(x, delta, weight, normed, eps, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """With ADD, store x + delta in delta and normalise that."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    values = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        source = delta + row * WIDTH + column
        total = (values + tl.load(source, mask=mask, other=0.0).to(tl.float32)).to(delta.dtype.element_ty)
        tl.store(source, total, mask=mask)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    scaled = values * scale
    if weight.dtype.element_ty == normed.dtype.element_ty:
        scaled = scaled.to(normed.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row * WIDTH + column, (scaled * factor).to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm(x, weight, bias, normed, eps, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    values = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, values - tl.sum(values, 0) / WIDTH, 0.0)
    result = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    if weight is not None:
        result *= tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed + row * WIDTH + column, result.to(normed.dtype.element_ty), mask=mask)
