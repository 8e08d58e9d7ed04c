"""Which rows of a step use which adapter, as the layers of a rank read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve_llm.engine.transfer import DeviceCopier


class SlotRows(NamedTuple):
    """The rows of a step that use the adapter in a slot."""

    slot: int
    rows: Tensor | None  # (rows,) int64; None: all rows of the step


class LoRAMapping:
    """The adapters of the rows of the current step."""

    def __init__(self) -> None:
        self.groups: list[SlotRows] = []
        self.slots: Tensor | None = None  # (rows,) or (1,) for all rows, int64: for `LoRASlots`; None without adapters
        self._num_rows = 0
        self._slots: Tensor | None = None  # see `find_slots`
        self._grouped: tuple[list[int | None], list[int]] | None = None  # slots and starts of `_latest`
        self._latest: list[SlotRows] = []  # groups of the latest step that has some

    def begin(self, groups: list[SlotRows], num_rows: int = 0, slots: Tensor | None = None) -> None:
        """num_rows: of the step, for `find_slots`."""
        self.groups = groups
        self.slots = slots
        self._num_rows = num_rows
        self._slots = None

    def begin_sequences(
        self,
        slots: Sequence[int | None],
        starts: Sequence[int],
        copier: DeviceCopier,
        is_grouped: bool,
        has_slots: bool,
    ) -> None:
        """slots: one per sequence, None without an adapter. starts: where each one's rows begin, and the end.
        is_grouped: whether layers read `groups`. has_slots: whether layers read `slots`."""
        groups = self._group(slots, starts, copier.device) if is_grouped else []
        of_rows = copier.to_device(spread_slots(slots, np.diff(starts))) if has_slots else None
        self.begin(groups, starts[-1], of_rows)

    def _group(self, slots: Sequence[int | None], starts: Sequence[int], device: torch.device) -> list[SlotRows]:
        """Return the same list while steps have the same rows, so that layers can keep what they prepared for it."""
        key = list(slots), list(starts)
        if key != self._grouped:
            self._latest = _group(slots, starts, device)
            self._grouped = key
        return self._latest

    def find_slots(self, device: torch.device) -> Tensor:
        """(rows of the step,) int64: the slot of each row, -1 without an adapter. Computed once per step."""
        if self._slots is None:
            self._slots = torch.full((self._num_rows,), -1, device=device)
            for slot, rows in self.groups:
                self._slots[slice(None) if rows is None else rows] = slot
        return self._slots


def spread_slots(slots: Sequence[int | None], counts: np.ndarray) -> np.ndarray:
    """(rows,) int64: the slot of each row, -1 without an adapter. slots: one per sequence. counts: rows of each."""
    numbers = np.array([-1 if slot is None else slot for slot in slots], np.int64)
    spread: np.ndarray = np.repeat(numbers, counts)
    return spread


def _group(slots: Sequence[int | None], starts: Sequence[int], device: torch.device) -> list[SlotRows]:
    rows: dict[int, list[int]] = {}
    for slot, start, end in zip(slots, starts, starts[1:], strict=False):
        if slot is not None and end > start:
            rows.setdefault(slot, []).extend(range(start, end))
    return [
        SlotRows(slot, None if len(indices) == starts[-1] else torch.tensor(indices, device=device))
        for slot, indices in sorted(rows.items())
    ]
