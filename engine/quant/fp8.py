"""Weights in 8-bit floating point, made while loading from floating-point ones of more bits: one scale per output.

Knows tensors, nothing of models or ranks: it gets what a rank holds of a product. So a row-parallel product that is
quantised here has scales of each rank's own inputs, which fit them at least as well as those of the whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve_llm.engine.errors import OptionError
from serve_llm.kernels.linear_fp8 import DTYPE, LARGEST, works

CHUNK = 1024  # outputs that are converted at a time: what is needed besides the result stays small


def check(device: torch.device) -> None:
    """Raises OptionError where such products cannot be computed. The first call in a process tries one."""
    if not works(device):
        raise OptionError(
            "--quantization fp8: this GPU and this build of torch do not multiply 8-bit floats (needed: a GPU of "
            "compute capability 8.9 or more, such as an L40, H100 or H200); leave the option away"
        )


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: (outputs, inputs), any float dtype -> float8_e4m3fn numbers of the same shape, scales (outputs, 1)
    float32.

    scale = largest magnitude / 448, numbers rounded to nearest, halves to even. An output whose weights are all zero
    has scale 0. NaN and infinity make the scale such, and with it what is computed.
    """
    numbers = torch.empty(weight.shape, dtype=DTYPE, device=weight.device)
    scales = torch.zeros(weight.shape[0], 1, device=weight.device)
    for start in range(0, weight.shape[0] if weight.numel() else 0, CHUNK):
        wide = weight[start : start + CHUNK].float()
        scale = wide.abs().amax(1, keepdim=True) / LARGEST
        numbers[start : start + CHUNK] = (wide / torch.where(scale > 0, scale, 1.0)).to(DTYPE)
        scales[start : start + CHUNK] = scale
    return numbers, scales
