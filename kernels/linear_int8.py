"""Linear layers in int8 (W8A8): weights have a scale per output, activations a dynamic scale per row.

Weights are symmetric int8. Each row of activations is divided by its own scale (largest magnitude / 127) and rounded.
oneDNN multiplies unsigned by signed bytes, so the row is stored as uint8 with zero point 128. (For two signed operands
oneDNN has only a slow reference path.) oneDNN supports one scale per tensor; it gets 1, and each row's scale is applied
to the float32 result. Where oneDNN's products are not exact, they are computed in float64. This is the vector-wise
quantisation of LLM.int8 (arXiv:2208.07339) without its outlier path, and the "int-quantized" format of
compressed-tensors with dynamic token scales.

Batch invariance: sums of integers are exact, and everything else is elementwise, so a row's bits never depend on other
rows. Rows are padded only because oneDNN keeps code for each number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from serve_llm.kernels.linear import MAX_ROWS, Linear, few_sizes, with_rows

ZERO_POINT = 128
LARGEST = 127.0  # largest quantised number
CHUNK = 1024  # outputs whose weights are widened at a time, to keep temporary memory small
SMALLEST_ROW = 1e-30  # a row whose largest magnitude is less becomes zeros; keeps its reciprocal finite
Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: (rows, inputs), any float dtype -> uint8 numbers of its shape, 128 for zero, and scales (rows, 1) float32.

    Rounded to nearest, halves up. Multiplication and addition stay separate operations, because torch might fuse them
    for some numbers of a row only, which would round these differently.
    """
    largest = x.abs().amax(1, keepdim=True).float().clamp_min_(SMALLEST_ROW)
    scaled = x * (LARGEST / largest)  # float32, also from bfloat16
    return scaled.add_(ZERO_POINT + 0.5).to(torch.uint8), largest / LARGEST


def pack_int8(
    weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, quantise: Quantise = quantise_rows
) -> Linear:
    """Build the layer x @ (weight * scale).T + bias, with x rounded row by row to 8 bits. For a CPU.

    weight: (outputs, inputs) int8; scale: (outputs, 1) float32; bias: (outputs,) of x's dtype, or None. x may have any
    float dtype, and the result has the same; between them are int32 and float32. A row with NaN or infinity gives
    numbers that are not finite. There may be no outputs or no inputs; without inputs the result is the bias, or zeros.
    quantise: a version of `quantise_rows`.
    """
    if weight.numel() == 0:
        return ConstantLinear(weight.shape[0], bias)
    scale = scale.flatten().contiguous()
    if not is_onednn_exact():
        return _Int8Linear(weight.contiguous(), scale, bias, quantise, _multiply_in_float64)
    packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), [1, weight.shape[1]])
    return _Int8Linear(packed, scale, bias, quantise, _multiply_by_onednn)


@cache
def is_onednn_exact() -> bool:
    """Whether torch computes exact int8 products on this processor. It uses private operators, so try them.

    Processors without VNNI saturate sums of two products at 16 bits, which the largest numbers show.
    """
    weight = torch.full((16, 64), -127, dtype=torch.int8)
    weight[::2] = 127
    x = torch.full((2, 64), 255, dtype=torch.uint8)
    x[1] = 1
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, [1, 64])
        y = _multiply_by_onednn(x, packed, torch.ones(16))
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(y, (x.float() - ZERO_POINT) @ weight.float().T)


def _multiply_by_onednn(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """(x - 128) @ weight.T * scale in float32. x: (rows, inputs) uint8. packed: the weight as oneDNN keeps it."""
    no_points = torch.empty(0, dtype=torch.int64)  # weights are symmetric
    y: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, ZERO_POINT, packed, scale, no_points, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def _multiply_in_float64(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """(x - 128) @ weight.T * scale in float32. x: (rows, inputs) uint8; weight: (outputs, inputs) int8."""
    numbers = x.double() - ZERO_POINT
    parts = [numbers @ part.double().T for part in torch.split(weight, CHUNK)]
    return torch.cat(parts, dim=1).float() * scale


@dataclass(frozen=True)
class _Int8Linear:
    weight: Tensor  # as `multiply` takes it
    scale: Tensor  # (outputs,) float32
    bias: Tensor | None
    quantise: Quantise
    multiply: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        y = x.new_empty(rows, self.scale.shape[0])
        for start in range(0, rows, MAX_ROWS):
            piece = x[start : start + MAX_ROWS]
            y[start : start + MAX_ROWS] = self._piece(piece)[: piece.shape[0]]
        return y

    def _piece(self, x: Tensor) -> Tensor:
        """float32, more rows than x has."""
        numbers, scales = self.quantise(with_rows(x, few_sizes(x.shape[0])))
        y = self.multiply(numbers, self.weight, self.scale).mul_(scales)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True)
class ConstantLinear:
    """A layer without inputs or outputs: the bias, or zeros."""

    outputs: int
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape[0], self.outputs)
        return y if self.bias is None else y.add_(self.bias)
