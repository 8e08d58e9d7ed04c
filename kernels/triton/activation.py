"""Activation functions, in Triton. Contracts stand at the functions of the same names in `kernels/activation.py`.

Another one is a function of float32 numbers below and a line in ACTIVATIONS. relu stays torch's: one launch as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of a program
WARPS = 4


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):  # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), which keeps its digits far left of 0
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _relu2(x):  # what is below 0, and not NaN, becomes 0
    return tl.where(x < 0.0, 0.0, x * x)


def _and_mul(function: triton.JITFunction, gate_up: Tensor) -> Tensor:
    """function(gate), rounded, times up. gate_up: (tokens, 2 * width) -> (tokens, width)."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    y = gate_up.new_empty((rows, width))
    if y.numel():
        grid = (rows, triton.cdiv(width, BLOCK))
        _gated[grid](gate_up, y, gate_up.stride(0), FUNCTION=function, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS)
    return y


def _of_each(function: triton.JITFunction, x: Tensor) -> Tensor:
    """function(x), any shape."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _plain[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), FUNCTION=function, BLOCK=BLOCK, num_warps=WARPS)
    return y


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": partial(_and_mul, _silu),
    "gelu_tanh_and_mul": partial(_and_mul, _gelu_tanh),
    "gelu": partial(_of_each, _gelu),
    "gelu_tanh": partial(_of_each, _gelu_tanh),
    "relu2": partial(_of_each, _relu2),
}


@triton.jit
def _gated(gate_up, y, gate_up_row, FUNCTION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    places = gate_up + row * gate_up_row + column
    gate = tl.load(places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(places + WIDTH, mask=inside, other=0.0).to(tl.float32)
    rounded = FUNCTION(gate).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * WIDTH + column, (rounded * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _plain(x, y, count, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, FUNCTION(wide).to(y.dtype.element_ty), mask=inside)
