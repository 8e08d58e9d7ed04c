"""Oracle for `kernels.linear_grouped`: the weight converted to float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from serve_llm.kernels.linear_grouped import GroupQuantWeight


def pack_grouped(weight: GroupQuantWeight, bias: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Same contract as `kernels.linear_grouped.pack_grouped`."""
    dense = weight.dequantise().double()

    def linear(x: Tensor) -> Tensor:
        y = x.double() @ dense.T
        return (y if bias is None else y + bias.double()).to(dtype)

    return linear
