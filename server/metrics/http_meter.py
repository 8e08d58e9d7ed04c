"""Counts HTTP requests by route, method and status, and measures their durations.

Routes are templates such as /v1/models/{name}, never paths, so that clients cannot create labels.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import msgspec

from serve_llm.server.metrics.histogram import Histogram, HistogramCounts

NO_ROUTE = "none"  # in place of the template if no route was reached: unknown path or missing key
OTHER_METHOD = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_SECONDS = (0.1, 0.5, 1.0)  # few, because there is a histogram for each route and method
# Polled by machines, not called by clients, so counted by status only.
_PROBES = frozenset({"/health", "/ping", "/ready", "/load", "/version", "/status", "/requests", "/metrics"})


@dataclass
class RouteTotals:
    """Requests of one route and method."""

    statuses: Counter[str] = field(default_factory=Counter)  # by class: "2xx"
    seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))


class RouteCounts(msgspec.Struct, frozen=True, array_like=True):
    route: str
    method: str
    statuses: dict[str, int]
    seconds: HistogramCounts


class HttpCounts(msgspec.Struct, frozen=True, array_like=True):
    """The counts of an `HttpMeter`."""

    statuses: dict[int, int]
    routes: list[RouteCounts]


class HttpMeter:
    """Counters of the HTTP requests of one process."""

    def __init__(self) -> None:
        self.statuses = Counter({200: 0})  # all requests; 200, so that the metric is there from the start
        self.routes: defaultdict[tuple[str, str], RouteTotals] = defaultdict(RouteTotals)  # by route and method

    def count(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a completed request. route: its template, or NO_ROUTE. seconds: until its last byte."""
        self.statuses[status] += 1
        if route in _PROBES:
            return
        totals = self.routes[route, method if method in _METHODS else OTHER_METHOD]
        totals.statuses[f"{status // 100}xx"] += 1
        totals.seconds.observe(seconds)

    def take(self) -> HttpCounts:
        """Return all counts and reset them."""
        statuses = {status: count for status, count in self.statuses.items() if count}
        routes = [
            RouteCounts(route, method, dict(totals.statuses), totals.seconds.take())
            for (route, method), totals in self.routes.items()
        ]
        self.statuses.clear()
        self.routes.clear()
        return HttpCounts(statuses, routes)

    def add(self, counts: HttpCounts) -> None:
        """Add the counts of another meter."""
        self.statuses.update(counts.statuses)
        for one in counts.routes:
            totals = self.routes[one.route, one.method]
            totals.statuses.update(one.statuses)
            totals.seconds.add(one.seconds)
