"""What the panels of the Grafana dashboards show about a server, queried from a real Prometheus.

Needs only what serving needs, so that tools/dashboard_picture.py runs after `make serve`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PROMETHEUS = shutil.which("prometheus")
DASHBOARDS = Path(__file__).parents[2] / "deploy" / "grafana"
SCRAPE_SECONDS = 1
WAIT_SECONDS = 240.0
# Grafana's variables. The interval is four scrapes, as Grafana chooses it.
VARIABLES = {"$__rate_interval": f"{4 * SCRAPE_SECONDS}s", "$model_name": ".*", "$instance": ".*"}


@dataclass
class Series:
    """One line of a panel. points: (Unix seconds, value), without values that are not numbers."""

    legend: str
    points: list[tuple[float, float]]


@dataclass
class Panel:
    """panel: its JSON. series: by the query that they answer."""

    uid: str  # of its dashboard
    panel: dict[str, Any]
    series: dict[str, list[Series]]

    @property
    def empty_queries(self) -> list[str]:
        """Return the queries without a single number."""
        return [query for query, lines in self.series.items() if not any(line.points for line in lines)]


class Prometheus:
    """A Prometheus process that scrapes one server. A context manager that ends it."""

    def __init__(self, url: str, directory: Path, api_key: str | None = None) -> None:
        """url: the server's. directory: an empty one for its data. api_key: the server's, if it requires one."""
        assert PROMETHEUS is not None
        scheme, _, place = url.rstrip("/").partition("://")
        job: dict[str, Any] = {"job_name": "serve-llm", "scheme": scheme, "static_configs": [{"targets": [place]}]}
        job["scrape_interval"] = f"{SCRAPE_SECONDS}s"
        if api_key:
            job["authorization"] = {"credentials": api_key}
        config = directory / "prometheus.yaml"
        config.write_text(yaml.safe_dump({"scrape_configs": [job]}))
        self._log = directory / "log"
        command = [PROMETHEUS, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
        command += ["--web.listen-address=127.0.0.1:0", "--log.level=info"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stderr=log)
        self._url = self._wait_for_address()

    def _wait_for_address(self) -> str:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            found = re.search(r'Listening on" address=(\S+)', self._log.read_text())
            if found is not None:
                return f"http://{found[1]}"
            assert time.monotonic() < deadline and self._process.poll() is None, self._log.read_text()
            time.sleep(0.05)

    def query_range(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """Return the series of a PromQL expression between two Unix times, with a value for each second."""
        given = {"query": expression, "start": start, "end": end, "step": SCRAPE_SECONDS}
        address = f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(given)}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


def read_panels(prometheus: Prometheus, start: float) -> list[Panel]:
    """Return all panels of the dashboards, with what their queries have found since `start`, in Unix seconds."""
    now = time.time()
    found = []
    for path in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            series = {}
            for target in panel.get("targets", []):
                expression = target["expr"]
                for name, value in VARIABLES.items():
                    expression = expression.replace(name, value)
                lines = prometheus.query_range(expression, start, now)
                series[target["expr"]] = [_read_series(line, target["legendFormat"]) for line in lines]
            found.append(Panel(dashboard["uid"], panel, series))
    return found


def _read_series(line: dict[str, Any], legend: str) -> Series:
    points = [(when, float(value)) for when, value in line["values"] if value not in ("NaN", "+Inf", "-Inf")]
    labels: dict[str, str] = line["metric"]
    return Series(re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend), points)
