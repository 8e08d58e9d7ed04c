"""Int8 weights: made from floating-point ones, one scale per output, or taken as a checkpoint stores them.

Knows tensors, nothing of models or ranks: it gets what a rank holds of a product. So a row-parallel product that is
quantised here has scales of each rank's own inputs, which fit them at least as well as those of the whole row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve_llm.engine.errors import OptionError
from serve_llm.kernels.linear_int8 import LARGEST, works

CHUNK = 1024  # outputs that are converted at a time: what is needed besides the result stays small


def check() -> None:
    """Raises OptionError where int8 products cannot be computed. The first call in a process tries them."""
    if not works():
        raise OptionError(
            "--quantization int8: this processor and this build of torch do not compute int8 products exactly "
            "(needed: oneDNN, and AVX-512 VNNI, AVX-VNNI or AMX)"
        )


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: (outputs, inputs), any float dtype -> int8 numbers of the same shape, scales (outputs, 1) float32.

    Symmetric: scale = largest magnitude / 127, numbers rounded to nearest, halves to even. An output whose weights are
    all zero has scale 0. NaN and infinity make the scale such, and with it what is computed.
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
