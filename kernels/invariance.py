"""The self-check of linear layers on a CPU: a row's bits must not depend on the rows that it is computed with.

Which code a matrix library runs for a product depends on the processor and on the number of rows, so a fixed list of
processors would not be enough. Each new shape of layer is tested for a few milliseconds on the machine where it will
run. A layer that fails is always called with a fixed number of rows, and a log line says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger(__name__)

SIZES = (1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33, 48, 64, 65, 96, 128, 129, 255)  # rows of one call
MAX_ROWS = 256  # rows in the batch that all others are compared with
MIN_ROWS = 4
START_COST = 25 * 10**7  # multiplications of the largest batch at start: milliseconds
FIXED_ROWS = (32, 1)  # tried in this order; 32 rows take little longer than one if weights come from memory

Layer = Callable[[Tensor], Tensor]  # x: (rows, inputs) -> (rows, outputs)


@dataclass(frozen=True)
class LayerKind:
    """The properties by which a library chooses its code for a layer."""

    route: str
    outputs: int
    inputs: int
    dtype: torch.dtype  # dtype of the rows

    def __str__(self) -> str:
        return f"{self.outputs} x {self.inputs} in {str(self.dtype).removeprefix('torch.')} by {self.route}"


@dataclass(frozen=True)
class PaddedLinear:
    """Calls a layer with exactly `rows` rows at a time, the last of them padded with zeros."""

    layer: Layer
    rows: int

    def __call__(self, x: Tensor) -> Tensor:
        """x: (any, inputs) -> (any, outputs)."""
        padded = functional.pad(x, (0, 0, 0, -len(x) % self.rows if len(x) else self.rows))
        results = [self.layer(padded[start : start + self.rows]) for start in range(0, len(padded), self.rows)]
        return torch.cat(results)[: len(x)]


class BatchInvarianceChecker:
    """Tries each kind of layer once. One checker serves one model."""

    def __init__(self) -> None:
        self._fixed: dict[tuple[LayerKind, int], int | None] = {}  # by kind and number of threads

    def make_invariant(self, layer: Layer, kind: LayerKind, batch_size: int | None = None) -> Layer:
        """Return the layer if it is batch invariant, else a wrapper that calls it with a fixed number of rows.

        batch_size: number of rows that SIZES are compared with; None: as many as take a few milliseconds.
        """
        if kind.outputs * kind.inputs == 0:
            return layer
        key = kind, torch.get_num_threads()
        if key not in self._fixed:
            self._fixed[key] = _find_fixed_rows(layer, kind, batch_size)
        rows = self._fixed[key]
        return layer if rows is None else PaddedLinear(layer, rows)


def _find_fixed_rows(layer: Layer, kind: LayerKind, batch_size: int | None) -> int | None:
    """Return the number of rows with which to call the layer, or None if any number gives the same bits."""
    if batch_size is None:
        batch_size = min(max(START_COST // (kind.outputs * kind.inputs), MIN_ROWS), MAX_ROWS)
    differing = differing_sizes(layer, kind, batch_size)
    if not differing:
        return None
    for rows in FIXED_ROWS:
        if not differing_sizes(PaddedLinear(layer, rows), kind, max(batch_size, 2 * rows)):
            break
    logger.warning(
        "Linear layers of %s give a row different bits in batches of %d and %d rows, so they are computed %s, "
        "which is slower",
        kind,
        batch_size,
        differing[0],
        "row by row" if rows == 1 else f"{rows} rows at a time",
    )
    return rows


def differing_sizes(layer: Layer, kind: LayerKind, batch_size: int, sizes: Sequence[int] = SIZES) -> list[int]:
    """Return those of `sizes` below batch_size for which rows have other bits than in a batch of batch_size rows."""
    x = torch.randn((batch_size, kind.inputs), generator=torch.Generator().manual_seed(0)).to(kind.dtype)
    whole = layer(x)
    found = []
    for size in sizes:
        if size < batch_size and not torch.equal(layer(x[batch_size - size :]), whole[batch_size - size :]):
            found.append(size)
    return found
