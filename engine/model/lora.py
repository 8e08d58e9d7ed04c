"""LoRA (arXiv:2106.09685): linear layers that add adapters' low-rank products to the rows that ask for them.

Each rank holds up to --max-loras adapters in slots. A step's tokens are grouped by slot. The model's own linear kernels
compute the products of a group, so that a row has the same bits in any batch, and rows without an adapter are not
touched. Row-parallel layers add their products before the all-reduce.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from serve_llm.engine.model.lora_targets import MAX_ROWS
from serve_llm.kernels.linear import Linear

ADAPTABLE = re.compile(r"layers\.\d+\.(attention|ffn)\.")  # beginnings of the names of linear layers
Reorder = Callable[[str, Tensor], Tensor]


class SlotRows(NamedTuple):
    """The rows of a step that use the adapter in a slot."""

    slot: int
    rows: Tensor | None  # (rows,) int64; None: all rows of the step


@dataclass
class StepRows:
    """The groups of the step that is being computed."""

    groups: list[SlotRows] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class LoRAPart:
    """A rank's part of a weight of a merged linear layer."""

    shape: tuple[int, int]  # the whole weight's
    inputs: range  # this rank's
    outputs: range  # this rank's


@dataclass(frozen=True, eq=False)
class Expansion:
    """The second product of an adapter for one part of a linear layer."""

    columns: slice  # in the first product's result
    outputs: slice  # in the layer's result
    up: Linear


@dataclass(frozen=True, eq=False)
class LowRankProduct:
    """What an adapter adds to a linear layer: up @ down @ x. `up` includes the scale."""

    down: Linear
    expansions: tuple[Expansion, ...]

    def add_to(self, y: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """Add to these rows of y (tokens, outputs) what belongs to them in x (tokens, inputs). None: to all."""
        num_rows = len(x) if rows is None else len(rows)
        for start in range(0, num_rows, MAX_ROWS):
            chunk = slice(start, start + MAX_ROWS)
            hidden = self.down(x[chunk] if rows is None else x[rows[chunk]])
            for expansion in self.expansions:
                product = expansion.up(hidden[:, expansion.columns].contiguous())
                if rows is None:
                    y[chunk, expansion.outputs] += product
                else:
                    y[:, expansion.outputs].index_add_(0, rows[chunk], product)


@dataclass(eq=False, repr=False)
class LoRALinear:
    """A linear layer with the products of the adapters that are loaded."""

    base: Linear
    parts: Mapping[str, LoRAPart]  # by parameter, such as "layers.3.attention.q.weight"; in the order of the outputs
    reorders: tuple[Reorder, ...]  # bring the rows of a parameter into the order of the layer's outputs
    step: StepRows
    products: dict[int, LowRankProduct] = field(default_factory=dict)  # by slot

    def __call__(self, x: Tensor, /) -> Tensor:
        y = self.base(x)
        for slot, rows in self.step.groups:
            product = self.products.get(slot)
            if product is not None:
                product.add_to(y, x, rows)
        return y


class LoRALayers:
    """All linear layers of a rank that adapters can change, and the rows of the current step."""

    def __init__(self) -> None:
        self.layers: list[LoRALinear] = []
        self._all = StepRows()
        self._selected = StepRows()  # in the last layer, after the attention

    def wrap(
        self, base: Linear, parts: Mapping[str, LoRAPart], reorders: tuple[Reorder, ...], *, is_selected: bool
    ) -> Linear:
        """`base` with adapters, where they can change it and this rank has a part of it.

        is_selected: it computes only the selected rows (see `Decoder.forward`).
        """
        has_share = any(part.inputs and part.outputs for part in parts.values())
        if not has_share or not all(map(_is_adaptable, parts)):
            return base
        layer = LoRALinear(base, parts, reorders, self._selected if is_selected else self._all)
        self.layers.append(layer)
        return layer

    def begin_step(
        self, slots: Sequence[int | None], starts: Sequence[int], selected_starts: Sequence[int], device: torch.device
    ) -> None:
        """slots: one per sequence, None without an adapter. starts: where each one's tokens begin, and the end.
        selected_starts: the same for the selected tokens."""
        self._all.groups = _group(slots, starts, device)
        self._selected.groups = _group(slots, selected_starts, device)

    def end_step(self) -> None:
        """What follows computes only the base model."""
        self._all.groups = []
        self._selected.groups = []


def _is_adaptable(parameter: str) -> bool:
    matched = ADAPTABLE.match(parameter)
    return matched is not None and parameter[matched.end() :].count(".") == 1  # not those of experts


def _group(slots: Sequence[int | None], starts: Sequence[int], device: torch.device) -> list[SlotRows]:
    rows: dict[int, list[int]] = {}
    for slot, start, end in zip(slots, starts, starts[1:], strict=False):
        if slot is not None and end > start:
            rows.setdefault(slot, []).extend(range(start, end))
    return [
        SlotRows(slot, None if len(indices) == starts[-1] else torch.tensor(indices, device=device))
        for slot, indices in sorted(rows.items())
    ]
