"""Every query of the Grafana dashboards has data for a real server, according to a real Prometheus."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.dashboard_data import run_under_load
from support.dashboard_panels import PROMETHEUS


@pytest.mark.slow
@pytest.mark.skipif(PROMETHEUS is None, reason="needs the program prometheus")
def test_every_query_has_data(tmp_path: Path) -> None:
    with run_under_load(tmp_path) as panels:
        empty = {f"{panel.uid} {panel.panel['title']}": panel.empty_queries for panel in panels if panel.empty_queries}
    assert empty == {} and len(panels) > 50
