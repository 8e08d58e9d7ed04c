"""Oracle for `kernels.linear`: float64 with one rounding at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def pack(weight: Tensor, bias: Tensor | None = None, merged: Sequence[Tensor] = ()) -> Callable[[Tensor], Tensor]:
    """Same contract as `kernels.linear.pack`."""

    weight = torch.cat((weight, *merged))

    def linear(x: Tensor) -> Tensor:
        y = x.double() @ weight.double().T
        return (y if bias is None else y + bias.double()).to(x.dtype)

    return linear


def pack_heads(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Same contract as `kernels.linear.pack_heads`."""
    wide = weight.double()
    return lambda x: torch.einsum("rhi,hoi->rho", x.double(), wide).to(x.dtype)
