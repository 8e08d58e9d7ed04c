"""Numbers of an fp8 KV cache (float8_e4m3fn), on GPUs: keys and values without a scale, as vLLM stores those of models
that were not calibrated.

A number of magnitude 2**-6 to 448 keeps 4 significant bits, so a scale would not change its error.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # larger magnitudes are clamped to this


def quantise(x: Tensor) -> Tensor:
    """Floating point of any shape -> float8_e4m3fn, rounded to nearest. NaN stays NaN."""
    return x.float().clamp(-LARGEST, LARGEST).to(DTYPE)
