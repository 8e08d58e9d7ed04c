"""Norms of rows with their weights, alone or of a sum: most follow the addition of what a part of a layer made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from serve_llm.kernels.table import Kernels


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, width) -> the same shape."""

    def of_sum(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """hidden + delta, which may take delta's memory, and its norm. All (rows, width)."""


@dataclass(frozen=True)
class RmsNorm:
    weight: Tensor
    eps: float
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def of_sum(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.add_rms_norm(hidden, delta, self.weight, self.eps)


@dataclass(frozen=True)
class LayerNorm:
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def of_sum(self, hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        total = hidden + delta
        return total, self(total)
