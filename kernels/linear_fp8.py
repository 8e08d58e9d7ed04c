"""Linear layers in fp8 (W8A8, float8_e4m3fn): weights have a scale per output, activations a scale per row, which is
dynamic, or static and the same for all rows.

The product is torch's `scaled_mm` with one scale per row of either operand. Not every GPU and build of torch has it, so
`is_supported` tries it. It needs sizes in multiples of 16; weights are padded once, and rows when they are quantised.
The number format is that of arXiv:2209.05433, the scheme that of compressed-tensors' "float-quantized" with scales per
channel and token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.kernels import linear
from serve_llm.kernels.linear import Linear

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # largest e4m3 number
SMALLEST_ROW = 1e-30  # a row whose largest magnitude is less becomes zeros; keeps its reciprocal finite
MULTIPLE = 16  # the product's sizes must be divisible by this


class Quantise(Protocol):
    """A version of `quantise_rows`."""

    def __call__(self, x: Tensor, width: int, input_scale: Tensor | None = None, /) -> tuple[Tensor, Tensor]: ...


def quantise_rows(x: Tensor, width: int, input_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x: (rows, inputs), any float dtype -> float8_e4m3fn numbers (rows, width), zeros after the inputs, and scales
    (rows, 1) float32: largest magnitude / 448. Rounded to nearest, halves to even.

    input_scale: () float32, the scale of all rows instead. Numbers beyond 448 times it become the largest ones. In a
    row that holds NaN or infinity there is NaN among the numbers.
    """
    wide = functional.pad(x, (0, width - x.shape[1])).float()
    if input_scale is not None:
        limited = (wide * (1.0 / input_scale)).clamp(-LARGEST, LARGEST)
        numbers = torch.where(wide.isfinite(), limited, torch.nan)
        return numbers.to(DTYPE), input_scale.repeat(len(x), 1)
    largest = wide.abs().nan_to_num(0.0, torch.inf).amax(1, keepdim=True).clamp_min_(SMALLEST_ROW)
    most = torch.tensor(LARGEST, device=x.device)  # a number / tensor rounds twice
    return (wide * (most / largest)).to(DTYPE), largest / most


def pack_fp8(
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    input_scale: Tensor | None = None,
    quantise: Quantise = quantise_rows,
) -> Linear:
    """Build the layer x @ (weight * scale).T + bias in bfloat16, with x rounded row by row to 8 bits. If `works()`.

    weight: (outputs, inputs) float8_e4m3fn; scale: (outputs, 1) float32; bias: (outputs,) bfloat16, or None. x and the
    result: bfloat16. Sums are float32; rows that hold NaN or infinity give NaN. There may be no outputs or no
    inputs; without inputs the result is the bias, or zeros. input_scale: see `quantise_rows`.
    """
    outputs, inputs = weight.shape
    if weight.numel() == 0:
        return linear.pack(weight.bfloat16(), bias)
    missing = -outputs % MULTIPLE
    padded = functional.pad(weight.view(torch.uint8), (0, -inputs % MULTIPLE, 0, missing)).view(DTYPE)
    scales = functional.pad(scale, (0, 0, 0, missing)).t().contiguous()
    padded_bias = None if bias is None else functional.pad(bias, (0, missing))
    return _Scaled(padded.t(), scales, padded_bias, outputs, input_scale, quantise)


@cache
def is_supported(device: torch.device) -> bool:
    """Whether torch computes the product correctly on the device. GPUs need compute capability 8.9 or more."""
    numbers = torch.eye(MULTIPLE, device=device).mul_(2.0).to(DTYPE)
    scales = torch.full((MULTIPLE, 1), 0.5, device=device)
    try:
        y = pack_fp8(numbers, scales)(torch.eye(MULTIPLE, dtype=torch.bfloat16, device=device))
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return False
    return torch.equal(y, torch.eye(MULTIPLE, dtype=torch.bfloat16, device=device))


@dataclass(frozen=True)
class _Scaled:
    weight: Tensor  # (inputs, outputs) float8_e4m3fn, inputs side by side in memory; padded, as are the next two
    scale: Tensor  # (1, outputs) float32
    bias: Tensor | None
    outputs: int  # without the padding
    input_scale: Tensor | None
    quantise: Quantise

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self.outputs)
        numbers, scales = self.quantise(x, self.weight.shape[0], self.input_scale)
        y = functional.scaled_mm(
            numbers,
            self.weight,
            scales,
            functional.ScalingType.RowWise,
            self.scale,
            functional.ScalingType.RowWise,
            bias=self.bias,
            output_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return y[:, : self.outputs]
