"""Which rank of an expert-parallel group holds which experts of a layer, and how to balance their work. No torch.

Each rank has a fixed number of slots, and each slot holds one expert. With more slots than experts, some experts are
held more than once, and their rows are divided among the copies. An expert's result does not depend on where it is
computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

Placement = tuple[tuple[int, ...], ...]  # by rank: the expert of each slot; every expert has at least one

MIN_GAIN = 0.05  # minimum gain, as a fraction of the busiest rank's rows, for which moving weights is worthwhile
STAY_FACTOR = 1.02  # a rank keeps an expert if it has at most this many times the rows of the least busy rank


@cache
def fill_slots(spans: tuple[range, ...], num_redundant: int) -> Placement:
    """The placement at the start: each rank holds its span, then copies of the experts that follow it. Slots are spread
    evenly over the ranks.

    spans: consecutive, from the first expert to the last one. num_redundant: slots besides one for each expert.
    """
    experts = range(spans[0].start, spans[-1].stop)
    total = len(experts) + (num_redundant if experts else 0)
    ranks = len(spans)
    slots = [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    return tuple(
        tuple(experts[(span.start - experts.start + slot) % len(experts)] for slot in range(count))
        for span, count in zip(spans, slots, strict=True)
    )


def count_rows(placement: Placement, rows: Sequence[int], first: int) -> list[float]:
    """The rows that each rank computes. rows: of each expert. first: number of the first expert."""
    copies = Counter(expert for slots in placement for expert in slots)
    return [sum(rows[expert - first] / copies[expert] for expert in slots) for slots in placement]


def balance(placement: Placement, rows: Sequence[int], first: int) -> Placement:
    """Find a placement in which the busiest rank has fewer rows; returns the given one if none is much better.

    The experts with the most rows per copy get the redundant slots, then copies go to the least busy ranks, those with
    the most rows first, similar to the packing of DeepSeek's EPLB (github.com/deepseek-ai/EPLB). For the arguments see
    `count_rows`.
    """
    ranks = len(placement)
    copies = [1] * len(rows)
    for _ in range(sum(map(len, placement)) - len(rows)):
        free = [expert for expert, count in enumerate(copies) if count < ranks]
        copies[max(free, key=lambda expert: (rows[expert] / copies[expert], -expert))] += 1
    shares = [(rows[expert] / copies[expert], expert) for expert in range(len(rows)) for _ in range(copies[expert])]
    # Experts with copies come first, while there are still enough different ranks for the copies.
    shares.sort(key=lambda share: (copies[share[1]] == 1, -share[0], share[1]))
    packed = _pack(placement, shares, first)
    limit = (1 - MIN_GAIN) * max(count_rows(placement, rows, first))
    if not any(rows) or packed is None or max(count_rows(packed, rows, first)) > limit:
        return placement
    return tuple(_keep_slots(before, after) for before, after in zip(placement, packed, strict=True))


def _pack(placement: Placement, shares: Sequence[tuple[float, int]], first: int) -> Placement | None:
    """Assign each copy, (rows, expert), to a rank. None if two copies of an expert would be on one rank."""
    packed: list[list[int]] = [[] for _ in placement]
    busy = [0.0] * len(placement)
    for count, index in shares:
        expert = first + index
        free = [
            rank
            for rank, slots in enumerate(placement)
            if len(packed[rank]) < len(slots) and expert not in packed[rank]
        ]
        if not free:
            return None
        least = min(busy[rank] for rank in free)
        staying = [rank for rank in free if expert in placement[rank] and busy[rank] <= least * STAY_FACTOR]
        rank = min(staying or free, key=lambda rank: (busy[rank], rank))
        packed[rank].append(expert)
        busy[rank] += count
    return tuple(map(tuple, packed))


def _keep_slots(before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """Reorder the experts of `after` so that those that stay keep their slots."""
    added = iter([expert for expert in after if expert not in before])
    return tuple(expert if expert in after else next(added) for expert in before)
