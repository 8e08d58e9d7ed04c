"""Rotary position embedding, applied. Knows tensors only; where the angles come from is the model's matter."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate dimension i of every head with dimension i + head_dim / 2 (arXiv:2104.09864, the half-split pairing).

    query: (tokens, heads, head_dim), key: (tokens, kv_heads, head_dim); cos, sin: (tokens, head_dim / 2) float32.
    Computed in float32 and rounded once. Returns new tensors like query and key.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
