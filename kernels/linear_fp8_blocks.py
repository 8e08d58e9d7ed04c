"""Linear layers in fp8 (float8_e4m3fn) with a scale per 128 inputs: of a row, and of one or of 128 outputs of a weight
(DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.3.2).

The product is torch's `scaled_mm` (`BlockWise1x128`, `BlockWise128x128`), which GPUs of compute capability 9.0 support.
It demands that the scales of a row or output are as far apart as there are rows or outputs, and that those of 128
outputs are followed by padding to a multiple of 4. Numbers of rows are rounded up as well, so that the scales of a
block begin at multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.kernels import linear, linear_fp8
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.linear_fp8 import DTYPE, MULTIPLE

BLOCK = 128
SCALES = 4  # scales of 128 outputs, and rows, are padded to multiples of this
QuantiseBlocks = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def quantise_blocks(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """x: (rows, inputs), any float dtype -> float8_e4m3fn numbers (padded rows, width), and float32 scales (padded
    rows, blocks) with strides (1, padded rows). There are zeros after the rows and the inputs.

    width: a multiple of 128. Each block is rounded as a row of `linear_fp8.quantise_rows`.
    """
    rows = -(-x.shape[0] // SCALES) * SCALES
    padded = functional.pad(x, (0, width - x.shape[1], 0, rows - x.shape[0]))
    numbers, scales = linear_fp8.quantise_rows(padded.reshape(-1, BLOCK), BLOCK)
    return numbers.view(rows, width), scales.view(rows, width // BLOCK).t().contiguous().t()


def pack_fp8_blocks(
    weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, quantise: QuantiseBlocks = quantise_blocks
) -> Linear:
    """Build the layer x @ (weight * scales of its blocks).T + bias in bfloat16, with blocks of x rounded to 8 bits.

    weight: (outputs, inputs) float8_e4m3fn; scale: (outputs, blocks of inputs) float32; bias: (outputs,) bfloat16, or
    None. `is_supported` says whether it works. Outputs that share scales in blocks of 128 take one scale per block. x
    and the result: bfloat16. Sums are float32; rows that hold NaN or infinity give NaN. There may be no outputs or no
    inputs. quantise: a version of `quantise_blocks`.
    """
    outputs, inputs = weight.shape
    if weight.numel() == 0:
        return linear.pack(weight.bfloat16(), bias)
    is_square = has_square_blocks(scale)
    missing = -outputs % (BLOCK if is_square else MULTIPLE)
    padded = functional.pad(weight.view(torch.uint8), (0, -inputs % BLOCK, 0, missing)).view(DTYPE)
    if is_square:
        scales = functional.pad(scale[::BLOCK], (0, -scale.shape[1] % SCALES)).contiguous().t()
    else:
        scales = functional.pad(scale, (0, 0, 0, missing)).t().contiguous().t()
    return _ScaledBlocks(padded.t(), scales, is_square, bias, outputs, quantise)


def has_square_blocks(scale: Tensor) -> bool:
    """Whether the scales, (outputs, blocks of inputs), are the same in each block of 128 outputs."""
    return torch.equal(scale[::BLOCK].repeat_interleave(BLOCK, 0)[: len(scale)], scale)


@cache
def is_supported(device: torch.device, is_square: bool) -> bool:
    """Whether torch computes the product correctly on the device. is_square: with one scale for 128 outputs."""
    size = 2 * BLOCK
    place = torch.arange(size, device=device)
    numbers = torch.zeros((size, size), device=device)
    numbers[place, place] = numbers[place, place ^ BLOCK] = 1.0
    scales = torch.tensor([[0.5, 0.25], [2.0, 8.0]], device=device).repeat_interleave(BLOCK, 0)
    if not is_square:
        scales[7] = 4.0
    x = torch.diag((place % 5).float().exp2())
    exact = x @ (numbers * scales.repeat_interleave(BLOCK, 1)).t()  # powers of two
    for rows in (1, 17, size):  # libraries have other kernels for few rows
        try:
            y = pack_fp8_blocks(numbers.to(DTYPE), scales)(x[:rows].bfloat16())
        except (AttributeError, NotImplementedError, RuntimeError, ValueError):
            return False
        if not torch.equal(y.float(), exact[:rows]):
            return False
    return True


@dataclass(frozen=True)
class _ScaledBlocks:
    weight: Tensor  # (inputs, outputs) float8_e4m3fn, inputs side by side in memory; padded
    scale: Tensor  # (padded blocks, blocks of outputs) float32 if is_square, else (outputs, blocks)
    is_square: bool
    bias: Tensor | None
    outputs: int  # without the padding
    quantise: QuantiseBlocks

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self.outputs)
        numbers, scales = self.quantise(x, self.weight.shape[0])
        kinds = functional.ScalingType
        y = functional.scaled_mm(
            numbers,
            self.weight,
            scales,
            kinds.BlockWise1x128,
            self.scale,
            kinds.BlockWise128x128 if self.is_square else kinds.BlockWise1x128,
            output_dtype=torch.bfloat16,
        )[: len(x), : self.outputs]
        return y if self.bias is None else y + self.bias
