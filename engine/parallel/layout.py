"""Arithmetic of parallelism: the coordinates of ranks, and even and uneven splits of heads, sizes and layers.

Pure: no torch, no processes. Ranks of one engine are numbered stage by stage; data-parallel engines are separate.

    rank = pp_rank * tp_size + tp_rank      -tp 2 -pp 3:   stage 0: ranks 0 1 | stage 1: ranks 2 3 | stage 2: ranks 4 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from serve_llm.common.splits import split_evenly


@dataclass(frozen=True)
class ParallelLayout:
    """The ranks of one engine: `tp_size` in each of `pp_size` pipeline stages."""

    tp_size: int = 1
    pp_size: int = 1

    @property
    def size(self) -> int:
        return self.tp_size * self.pp_size

    def pp_rank(self, rank: int) -> int:
        """The rank's pipeline stage."""
        return rank // self.tp_size

    def tp_rank(self, rank: int) -> int:
        """Index within the rank's tensor-parallel group."""
        return rank % self.tp_size

    def rank(self, pp_rank: int, tp_rank: int) -> int:
        return pp_rank * self.tp_size + tp_rank

    def tp_group(self, rank: int) -> range:
        """All ranks of this rank's stage, itself included."""
        first = self.rank(self.pp_rank(rank), 0)
        return range(first, first + self.tp_size)

    @property
    def output_rank(self) -> int:
        """The one rank that samples: the first of the last stage."""
        return self.rank(self.pp_size - 1, 0)


def split_range(total: int, parts: int, weights: Sequence[float] | None = None, unit: int = 1) -> tuple[range, ...]:
    """Split 0 .. total - 1 into consecutive ranges, one per part, as evenly as whole units allow; some may be empty.

    Without weights the first parts get the larger shares: 28 over 3 is 10, 9, 9. With weights (one per part) every
    border is rounded to the nearest unit, so that no part is off by more than one unit. `unit` applies only if `total`
    is a multiple of it with at least as many units as parts; it keeps matrices at sizes that hardware handles well.
    """
    if total % unit or total // unit < parts:
        unit = 1
    units = total // unit
    if weights is None:
        return tuple(range(part.start * unit, part.stop * unit) for part in split_evenly(units, parts))
    whole = sum(weights)
    borders = [0, *(int(units * part / whole + 0.5) for part in accumulate(weights))]
    return tuple(range(a * unit, b * unit) for a, b in pairwise(borders))


@dataclass(frozen=True)
class HeadShare:
    """The query heads of one rank and the KV heads that they read."""

    heads: range
    kv_heads: range
    before: int  # number of query heads of the first KV head that earlier ranks hold


def split_heads(heads: int, kv_heads: int, parts: int, weights: Sequence[float] | None = None) -> tuple[HeadShare, ...]:
    """Split query heads as evenly as possible; each part also holds every KV head that its query heads read."""
    group_size = heads // kv_heads
    result = []
    for part in split_range(heads, parts, weights):
        first_kv = part.start // group_size
        if part:
            end_kv = -(-part.stop // group_size)
            result.append(HeadShare(part, range(first_kv, end_kv), part.start - first_kv * group_size))
        else:
            result.append(HeadShare(part, range(first_kv, first_kv), 0))
    return tuple(result)


def split_layers(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[range, ...]:
    """Split layers into consecutive ranges, at least one layer per stage, that minimise the cost of the most expensive
    stage.

    costs: one per layer. first, last: additional cost of the first and of the last stage. Among equally good splits,
    take the one with the smallest sum of squared stage costs. Requires stages <= layers.
    """
    count = len(costs)
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    # best[stop]: (highest stage cost, sum of squares, borders) of the best split of layers 0 .. stop - 1 so far
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(stages):
        left = stages - stage - 1  # later stages need a layer each
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
