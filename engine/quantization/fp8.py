"""Quantising weights to 8-bit floats while loading, with one scale per output.

It sees one rank's share of a linear layer. So in a row-parallel layer each rank has scales for its own inputs, which
fit at least as well as scales for whole rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve_llm.common.errors import OptionError
from serve_llm.kernels.linear_fp8 import DTYPE, LARGEST, is_supported
from serve_llm.kernels.linear_grouped import GroupQuantWeight

CHUNK = 1024  # outputs converted at a time, to keep temporary memory small


def check(device: torch.device) -> None:
    """Raise OptionError if the device cannot multiply 8-bit floats. The first call in a process tries it."""
    if not is_supported(device):
        raise OptionError(
            "--quantization fp8: this GPU and this build of torch do not multiply 8-bit floats (needed: a GPU of "
            "compute capability 8.9 or more, such as an L40, H100 or H200); use int8, or omit the option"
        )


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: (outputs, inputs), any float dtype -> float8_e4m3fn numbers of the same shape, scales (outputs, 1)
    float32.

    scale = largest magnitude / 448; numbers are rounded to nearest, ties to even. An output whose weights are all zero
    has scale 0. NaN and infinity propagate to the scale and so to the layer's result.
    """
    numbers = torch.empty(weight.shape, dtype=DTYPE, device=weight.device)
    scales = torch.zeros(weight.shape[0], 1, device=weight.device)
    for start in range(0, weight.shape[0] if weight.numel() else 0, CHUNK):
        wide = weight[start : start + CHUNK].float()
        scale = wide.abs().amax(1, keepdim=True) / LARGEST
        numbers[start : start + CHUNK] = (wide / torch.where(scale > 0, scale, 1.0)).to(DTYPE)
        scales[start : start + CHUNK] = scale
    return numbers, scales


def quantise_codes(weight: Tensor) -> GroupQuantWeight:
    """The same numbers and scales, for products in which activations are not rounded to 8 bits."""
    numbers, scales = quantise(weight)
    return GroupQuantWeight(numbers.view(torch.uint8), 8, scales, max(weight.shape[1], 1), is_float8=True)
