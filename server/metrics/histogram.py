"""Histograms as plain counts, which processes can send each other."""

from __future__ import annotations

from bisect import bisect_left

import msgspec


class Histogram:
    """Counts per bucket. `bounds` are the inclusive upper ends."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def take(self) -> HistogramCounts:
        """Return all observations and reset the histogram."""
        taken = HistogramCounts(self._counts, self.sum)
        self._counts = [0] * len(self._counts)
        self.sum = 0.0
        return taken

    def add(self, counts: HistogramCounts) -> None:
        self._counts = [count + more for count, more in zip(self._counts, counts.counts, strict=True)]
        self.sum += counts.sum

    def cumulative_buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of values up to it), as Prometheus expects them; the last bound is +Inf."""
        buckets = []
        total = 0
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    """Observations of a `Histogram`. counts: by bucket."""

    counts: list[int]
    sum: float
