"""Norms over the hidden dimension, alone or fused with the residual addition before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from serve_llm.kernels.registry import Kernels


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """x: (tokens, hidden_size) -> the same shape and dtype."""

    def add(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return residual + x and the norm of that sum. All are (tokens, hidden_size).

        The caller must not use x again: the sum may take its memory.
        """


@dataclass(frozen=True)
class RMSNorm:
    weight: Tensor  # (hidden_size,)
    eps: float
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.add_rms_norm(residual, x, self.weight, self.eps)


@dataclass(frozen=True)
class LayerNorm:
    weight: Tensor | None  # (hidden_size,)
    bias: Tensor | None  # (hidden_size,)
    eps: float
    kernels: Kernels

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.add_layer_norm(residual, x, self.weight, self.bias, self.eps)


class NoNorm:
    """Takes the place of a norm where a layer has none, and after the last layer of a rank."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, residual: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + x
        return total, total


NO_NORM = NoNorm()
