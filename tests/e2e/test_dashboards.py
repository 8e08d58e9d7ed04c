"""What the dashboard and the alerts ask for is what a real daemon's /metrics answers."""

from __future__ import annotations

from support.daemon import Daemon
from support.monitoring import PREFIX, expressions, metric_names


def test_every_metric_is_served(server: Daemon) -> None:
    wanted = set().union(*(metric_names(text) for text in expressions().values()))
    served = {name.removeprefix(PREFIX) for name in server.metrics() if name.startswith(PREFIX)}
    assert len(wanted) > 10 and wanted - served == set()
