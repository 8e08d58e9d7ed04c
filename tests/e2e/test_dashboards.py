"""Everything that the dashboard and the alerts query is in a real daemon's /metrics."""

from __future__ import annotations

import urllib.request

from support.daemon import Daemon
from support.monitoring import PREFIX, check_metrics, expressions, metric_names, needs_promtool


def test_every_metric_is_served(server: Daemon) -> None:
    wanted = set().union(*(metric_names(text) for text in expressions().values()))
    served = {name.removeprefix(PREFIX) for name in server.metrics() if name.startswith(PREFIX)}
    assert len(wanted) > 10 and wanted - served == set()


@needs_promtool
def test_promtool_finds_no_fault_in_metrics(server: Daemon) -> None:
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        check_metrics(answer.read().decode())
