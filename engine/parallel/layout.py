"""Who holds what, as arithmetic: ranks, even and uneven shares, layers per stage. Pure: no torch, no processes.

Ranks of one engine are ordered stage by stage, tensor-parallel place innermost; data-parallel engines are separate.

    rank = stage * tensor + place          -tp 2 -pp 3:   stage 0: ranks 0 1 | stage 1: ranks 2 3 | stage 2: ranks 4 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Grid:
    """The tensor x pipeline ranks of one engine."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline

    def stage(self, rank: int) -> int:
        return rank // self.tensor

    def place(self, rank: int) -> int:
        """Index within the rank's tensor-parallel group."""
        return rank % self.tensor

    def rank(self, stage: int, place: int) -> int:
        return stage * self.tensor + place

    def tensor_group(self, rank: int) -> range:
        """All ranks of this rank's stage, itself included."""
        first = self.rank(self.stage(rank), 0)
        return range(first, first + self.tensor)

    @property
    def output_rank(self) -> int:
        """The one rank that samples: the first of the last stage."""
        return self.rank(self.pipeline - 1, 0)


def shares(total: int, parts: int, weights: Sequence[float] | None = None, unit: int = 1) -> tuple[range, ...]:
    """Cut 0 .. total - 1 into consecutive ranges, one per part, as evenly as whole units allow; some may be empty.

    Without weights the first parts get the larger shares: 28 over 3 is 10, 9, 9. With weights (one per part) every
    border is rounded to the nearest unit, so that no part is off by more than one. `unit` counts only where `total` is
    a multiple of it with at least as many units as parts; it keeps matrices at sizes that hardware likes.
    """
    if total % unit or total // unit < parts:
        unit = 1
    units = total // unit
    if weights is None:
        small, rest = divmod(units, parts)
        borders = [0, *accumulate(small + (part < rest) for part in range(parts))]
    else:
        whole = sum(weights)
        borders = [0, *(int(units * part / whole + 0.5) for part in accumulate(weights))]
    return tuple(range(a * unit, b * unit) for a, b in pairwise(borders))


@dataclass(frozen=True)
class HeadShare:
    """Query heads of one rank, the KV heads that they read, and the place of the first in its KV head's group."""

    heads: range
    kv_heads: range
    before: int  # query heads of the first KV head that stand on earlier ranks


def head_shares(heads: int, kv_heads: int, parts: int, weights: Sequence[float] | None = None) -> tuple[HeadShare, ...]:
    """Query heads split evenly, whether they divide or not; KV heads are held wherever a query head reads them."""
    group = heads // kv_heads
    found = []
    for own in shares(heads, parts, weights):
        first = own.start // group
        touched = range(first, -(-own.stop // group)) if own else range(first, first)
        found.append(HeadShare(own, touched, own.start - first * group if own else 0))
    return tuple(found)


def stage_layers(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[range, ...]:
    """Consecutive layers per stage, at least one each, such that the dearest stage is as cheap as can be.

    costs: one per layer; first, last: what the first stage does before the layers and the last stage after them. Among
    equally good cuts, the one whose stages have the smallest sum of squared costs. Needs stages <= layers.
    """
    count = len(costs)
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    # best[stop]: (dearest stage, sum of squares, borders so far) of the cheapest way for the stages up to this one
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(stages):
        left = stages - stage - 1  # stages that still need a layer each
        best = {
            stop: min(
                (max(worst, cost(stage, start, stop)), squares + cost(stage, start, stop) ** 2, (*borders, stop))
                for start, (worst, squares, borders) in best.items()
                if start < stop
            )
            for stop in (range(stage + 1, count - left + 1) if left else (count,))
        }
    borders = best[count][2]
    return tuple(range(a, b) for a, b in pairwise(borders))
