"""What `kernels.rope` must compute: each pair of dimensions is a complex number, turned. For tests and for reading."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Same contract as `kernels.rope.apply_rope`."""
    turn = torch.complex(cos.double(), sin.double()).unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(*x.double().chunk(2, -1)) * turn
        return torch.cat((turned.real, turned.imag), -1).to(x.dtype)

    return rotate(query), rotate(key)
