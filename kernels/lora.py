"""The contract of kernels that add LoRA adapters (arXiv:2106.09685) to the outputs of a linear layer.

Without such a kernel, adapters are computed with ordinary linear kernels (`engine.model.lora`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

LoRAProduct: TypeAlias = Any  # an adapter's weights for one layer, in the form of the kernels that packed them


@dataclass(frozen=True, eq=False)
class OutputScale:
    """The effect of DoRA (arXiv:2402.09353) on a layer's own outputs."""

    factor: Tensor  # (outputs,) float32
    offset: Tensor | None  # (outputs,) float32: (1 - factor) * bias, so that the bias stays as it is

    def __call__(self, y: Tensor) -> Tensor:
        """y: (rows, outputs)."""
        scaled = y.float() * self.factor
        return (scaled if self.offset is None else scaled + self.offset).to(y.dtype)


class ExpansionWeight(NamedTuple):
    """The second product of an adapter for one part of a layer."""

    columns: slice  # taken from the first product's result
    outputs: slice  # where they go in the layer's result
    up: Tensor  # (outputs of the part, columns), of the dtype of `down`; includes the adapter's scale
    scale: OutputScale | None  # scales the layer's own outputs before the product is added


class LoRAKernels(Protocol):
    """Computes what adapters add to the outputs of one linear layer."""

    def pack(self, down: Tensor, expansions: Sequence[ExpansionWeight]) -> LoRAProduct:
        """down: (columns, inputs). The caller drops the weights afterwards."""

    def add(self, y: Tensor, x: Tensor, groups: Sequence[tuple[LoRAProduct, Tensor | None]]) -> None:
        """Add each product with its rows of x (rows, inputs) to y (rows, outputs).

        groups: the products, each with the indices, (n,) int64, of its rows; None: all rows. No row is in two groups.
        The bits of a row depend on its own numbers alone.
        """
