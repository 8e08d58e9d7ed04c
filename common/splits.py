"""Splits of whole numbers."""

from __future__ import annotations

from itertools import accumulate, pairwise


def split_evenly(total: int, parts: int) -> tuple[range, ...]:
    """Split 0 .. total - 1 into consecutive ranges, one per part, as evenly as possible; some may be empty.

    The first parts get the larger shares: 28 over 3 is 10, 9, 9.
    """
    small, rest = divmod(total, parts)
    borders = [0, *accumulate(small + (part < rest) for part in range(parts))]
    return tuple(range(start, stop) for start, stop in pairwise(borders))
