"""Oracle for `kernels.moe`: one token at a time, sums in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

Rows = Callable[[Tensor], Tensor]


def pack_experts(
    pairs: Iterable[tuple[Rows, Rows]], activation: Rows, own: range, adapters: None = None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Same contract as `kernels.moe.pack_experts`, without adapters."""
    held = dict(zip(own, pairs, strict=True))

    def experts(x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(len(x)):
            for weight, number in zip(weights[token].tolist(), experts[token].tolist(), strict=True):
                if number in held:
                    first, last = held[number]
                    total[token] += weight * last(activation(first(x[token : token + 1])))[0].double()
        return total.to(x.dtype)

    experts.reads_back = True  # type: ignore[attr-defined]
    return experts
