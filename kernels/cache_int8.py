"""Quantise and dequantise rows of an int8 KV cache, in plain torch.

A row is one head's key or value of one token: head_dim int8 numbers followed by the four bytes of a float32 scale (in
native byte order, unaligned). The cache is an int8 tensor whose last dimension is head_dim + SCALE_BYTES, so code that
moves blocks needs no special case. Quantisation is symmetric and per row: scale = largest magnitude / 127, number =
x / scale rounded half to even. A row that is not finite gets a scale that is not finite, so the error stays visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
MIN_MAGNITUDE = 1e-30  # smaller rows become 0; 127 / MIN_MAGNITUDE still fits in float32


def quantise(x: Tensor) -> Tensor:
    """(..., head_dim) floating point -> (..., head_dim + SCALE_BYTES) int8."""
    values = x.float()
    largest = values.abs().amax(-1, keepdim=True)
    most = torch.tensor(127.0, device=x.device)  # a Python number / tensor rounds twice
    inverse = most / largest.clamp_min(MIN_MAGNITUDE)
    numbers = (values * inverse).round_().nan_to_num_(0.0).to(torch.int8)
    return torch.cat([numbers, (largest / 127.0).view(torch.int8)], -1)


def dequantise(rows: Tensor, output: Tensor) -> None:
    """rows: (..., head_dim + SCALE_BYTES) int8. output: (..., head_dim) float32, overwritten."""
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    output.copy_(rows[..., :-SCALE_BYTES]).mul_(scale)
