"""Numbers of an fp8 KV cache (float8_e4m3fn), on GPUs. Keys and values are divided by the scales with which the
checkpoint was calibrated, by default 1.

A number of magnitude 2**-6 to 448 keeps 4 significant bits, so a scale does not change its error; larger ones need it.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # larger magnitudes are clamped to this


def quantise(x: Tensor) -> Tensor:
    """Floating point of any shape -> float8_e4m3fn, rounded to nearest. NaN stays NaN."""
    return x.float().clamp(-LARGEST, LARGEST).to(DTYPE)
