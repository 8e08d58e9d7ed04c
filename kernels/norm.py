"""Normalisation of rows. Rounds where transformers rounds, so that bf16 results agree with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to x's dtype, times weight (arXiv:1910.07467).

    x: (..., width), any float dtype; computed in float32. weight: (width,) in x's dtype, or in float32, where only the
    product is rounded, as in Gemma. Returns the shape and dtype of x.
    """
    values = x.float()
    scale = torch.rsqrt((values * values).mean(-1, keepdim=True) + eps)
    if weight.dtype != x.dtype:
        return (values * scale * weight).to(x.dtype)
    return weight * (values * scale).to(x.dtype)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return hidden + delta, rounded to their dtype, and `rms_norm` of the sum. hidden, delta: (rows, width).

    May overwrite delta, so the caller must not use it again.
    """
    total = hidden + delta
    return total, rms_norm(total, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, rounded once (arXiv:1607.06450).

    x: (rows, width). weight, bias: (width,) or None for 1 and 0. Returns the shape and dtype of x.
    """
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return hidden + delta, rounded to their dtype, and `layer_norm` of the sum. hidden, delta: (rows, width).

    May overwrite delta, so the caller must not use it again.
    """
    total = hidden + delta
    return total, layer_norm(total, weight, bias, eps)
