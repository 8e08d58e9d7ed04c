"""Rounding weights to int8, with a scale per output.

In a row-parallel layer each rank rounds its own inputs, for which its scales fit at least as well as those of whole
rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve_llm.kernels.linear_int8 import LARGEST

CHUNK = 1024  # outputs converted at a time, to keep temporary memory small


def quantise_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: (outputs, inputs), any float dtype -> int8 numbers of the same shape, scales (outputs, 1) float32.

    Symmetric: scale = largest magnitude / 127; numbers are rounded to nearest, ties to even. An output whose weights
    are all zero has scale 0. NaN and infinity propagate to the scale and so to the layer's result.
    """
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    if weight.numel() == 0:
        return numbers, weight.new_zeros(weight.shape[0], 1, dtype=torch.float32)
    scales = []
    for start in range(0, weight.shape[0], CHUNK):
        wide = weight[start : start + CHUNK].float()
        scale = wide.abs().amax(1, keepdim=True) / LARGEST
        numbers[start : start + CHUNK] = (wide / torch.where(scale > 0, scale, 1.0)).round_()
        scales.append(scale)
    return numbers, torch.cat(scales)
