"""Splits of whole numbers, and names for many of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, groupby, pairwise


def split_evenly(total: int, parts: int) -> tuple[range, ...]:
    """Split 0 .. total - 1 into consecutive ranges, one per part, as evenly as possible; some may be empty.

    The first parts get the larger shares: 28 over 3 is 10, 9, 9.
    """
    small, rest = divmod(total, parts)
    borders = [0, *accumulate(small + (part < rest) for part in range(parts))]
    return tuple(range(start, stop) for start, stop in pairwise(borders))


def name_numbers(noun: str, numbers: Iterable[int]) -> str:
    """Name numbered things by their ends, such as "rank 4", "ranks 0-3" and "nodes 1-5, 8"."""
    ordered = sorted(numbers)
    runs = [list(run) for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])]
    names = [str(run[0][1]) if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs]
    return f"{noun}{'s' if len(ordered) > 1 else ''} {', '.join(names)}"
