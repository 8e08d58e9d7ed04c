"""Oracle for `kernels.norm`: float64 with one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Same contract as `kernels.norm.rms_norm`."""
    wide = x.double()
    return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()).to(x.dtype)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Same contract as `kernels.norm.add_rms_norm`."""
    total = (hidden.double() + delta.double()).to(hidden.dtype)
    return total, rms_norm(total, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Same contract as `kernels.norm.layer_norm`."""
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    result = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        result = result * weight.double()
    if bias is not None:
        result = result + bias.double()
    return result.to(x.dtype)


def add_layer_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    total = hidden + delta
    return total, layer_norm(total, weight, bias, eps)
