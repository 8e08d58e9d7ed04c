"""The contracts of kernels that add LoRA adapters (arXiv:2106.09685) to the outputs of a linear layer.

A CPU's kernels take the rows of a step by adapter. A GPU's kernels hold the adapters of a layer in slots, so that a
captured step computes whatever adapters the slots hold. Without either, adapters are computed with ordinary linear
kernels (`engine.model.lora`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

LoRAProduct: TypeAlias = Any  # an adapter's weights for one layer, in the form of the kernels that packed them
LoRAGroups: TypeAlias = Any  # the rows of each of a layer's products, in the form of the kernels that prepared them


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

    def join(self, products: Sequence[LoRAProduct]) -> None:
        """Move the weights of an adapter's products into one block of memory, where that saves time."""

    def prepare(self, groups: Sequence[tuple[LoRAProduct, Tensor | None]]) -> LoRAGroups:
        """Prepare the groups for `add`, which may be called repeatedly with the same result.

        groups: the products, each with the indices, (n,) int64, of its rows; None: all rows. No row is in two groups.
        """

    def add(self, y: Tensor, x: Tensor, groups: LoRAGroups) -> None:
        """Add each product with its rows of x (rows, inputs) to y (rows, outputs).

        groups: from `prepare`. The bits of a row depend on its own numbers alone.
        """


class LoRASlots(Protocol):
    """The adapters of one linear layer. Slots have fixed addresses and one size, and are empty at first."""

    def put(self, slot: int, down: Tensor, expansions: Sequence[ExpansionWeight]) -> None:
        """Copy an adapter into the slot. down: (columns, inputs). Each expansion has the outputs of one part."""

    def clear(self, slot: int) -> None:
        """Empty the slot."""

    def add(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        """Add to y (rows, outputs) the product of each row of x (rows, inputs) with that row's adapter.

        slots: (rows,) int64: the slot of each row's adapter, -1 for none. It is read on the device. An empty slot adds
        nothing. The bits of a row depend on its own numbers alone.
        """


class AllocateLoRASlots(Protocol):
    def __call__(
        self, num_slots: int, max_rank: int, inputs: int, parts: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> LoRASlots:
        """parts: the outputs of each part of the layer, in order. max_rank: the most columns that a part may have."""
