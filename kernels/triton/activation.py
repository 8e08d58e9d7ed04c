"""Activation functions, in Triton. Contracts: the functions of the same names in `kernels/activation.py`.

To add one, write a function of float32 values and list it in ACTIVATIONS; one of gate and up is also given the output,
to which it may round. relu uses torch, which is one launch too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a program
WARPS = 4


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):  # (1 + tanh(y)) / 2 = 1 / (1 + exp(-2 y)), which stays accurate for large negative y
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def _relu2(x):  # keeps NaN
    return tl.where(x < 0.0, 0.0, x * x)


@triton.jit
def _silu_and_mul(gate, up, y):
    return _silu(gate).to(y.dtype.element_ty).to(tl.float32) * up


@triton.jit
def _gelu_tanh_and_mul(gate, up, y):
    return _gelu_tanh(gate).to(y.dtype.element_ty).to(tl.float32) * up


@triton.jit
def _swigluoai_and_mul(gate, up, y):  # keeps NaN
    gate = tl.where(gate > 7.0, 7.0, gate)
    up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
    return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)


def _gated_activation(function: triton.JITFunction, gate_up: Tensor) -> Tensor:
    """Return function(gate, up). gate_up: (tokens, 2 * width) -> (tokens, width)."""
    rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    y = gate_up.new_empty((rows, width))
    if y.numel():
        grid = (rows, triton.cdiv(width, BLOCK))
        _gated_kernel[grid](gate_up, y, gate_up.stride(0), FUNCTION=function, WIDTH=width, BLOCK=BLOCK, num_warps=WARPS)
    return y


def _elementwise_activation(function: triton.JITFunction, x: Tensor) -> Tensor:
    """Return function(x), of any shape."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _elementwise_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, y, x.numel(), FUNCTION=function, BLOCK=BLOCK, num_warps=WARPS
        )
    return y


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": partial(_gated_activation, _silu_and_mul),
    "gelu_tanh_and_mul": partial(_gated_activation, _gelu_tanh_and_mul),
    "swigluoai_and_mul": partial(_gated_activation, _swigluoai_and_mul),
    "gelu": partial(_elementwise_activation, _gelu),
    "gelu_tanh": partial(_elementwise_activation, _gelu_tanh),
    "relu2": partial(_elementwise_activation, _relu2),
}


@triton.jit
def _gated_kernel(gate_up, y, gate_up_row, FUNCTION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    source = gate_up + row * gate_up_row + column
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * WIDTH + column, FUNCTION(gate, up, y).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _elementwise_kernel(x, y, count, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    wide = tl.load(x + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + index, FUNCTION(wide).to(y.dtype.element_ty), mask=mask)
