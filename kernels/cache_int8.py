"""Rows of an int8 KV cache: one head's key or value of one token, in int8 with a scale of its own, in plain torch.

A row is head_dim int8 numbers and, right behind them, the four bytes of a float32 scale (the machine's byte order, any
address). A cache of such rows is an int8 tensor whose last dimension is head_dim + SCALE_BYTES; whoever moves blocks
need not know. Symmetric: scale = largest magnitude / 127, number = x / scale, rounded half to even. A row depends on
its own numbers only. One that is not finite gets a scale that is not, and so stays visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
SMALLEST = 1e-30  # magnitudes below are as good as 0; 127 / SMALLEST is still a float32


def quantise(x: Tensor) -> Tensor:
    """(..., head_dim) floating point -> (..., head_dim + SCALE_BYTES) int8."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    inverse = torch.tensor(127.0, device=x.device) / largest.clamp_min(SMALLEST)  # a number / tensor rounds twice
    numbers = (wide * inverse).round_().nan_to_num_(0.0).to(torch.int8)
    return torch.cat([numbers, (largest / 127.0).view(torch.int8)], -1)


def dequantise(rows: Tensor, into: Tensor) -> None:
    """rows: (..., head_dim + SCALE_BYTES) int8. into: (..., head_dim) float32, overwritten."""
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    into.copy_(rows[..., :-SCALE_BYTES]).mul_(scale)
