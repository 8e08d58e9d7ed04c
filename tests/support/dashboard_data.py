"""What the panels of deploy's Grafana dashboards show of a real server under load, asked of a real Prometheus."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.daemon import Daemon
from support.monitoring import dashboards

PROMETHEUS = shutil.which("prometheus")
SCRAPE_SECONDS = 1
WAIT_SECONDS = 240.0
# Two engines, one of which is killed; a queue that is soon full; drafts; the rest of what a panel is about.
OPTIONS = ("demo", "-dp", "2", "--max-queue", "8", "--max-num-seqs", "4", "--responses-store", "memory")
OPTIONS += ("--speculative-config", '{"method": "ngram"}', "--kv-offload-memory", "16MiB")
OPTIONS += ("--kv-cache-memory", "7MiB")
NUM_CLIENTS = 5
BURST = 60  # requests at once, of which some are refused
# Grafana's variables. The interval is that of four scrapes, as Grafana chooses it.
VARIABLES = {"$__rate_interval": f"{4 * SCRAPE_SECONDS}s", "$model_name": ".*", "$instance": ".*"}
SOURCE = "def area(width, height):\n    return width * height\n\n"


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
        """Queries without a single number."""
        return [query for query, lines in self.series.items() if not any(line.points for line in lines)]


class Prometheus:
    """A process that scrapes one server. A context manager that ends it."""

    def __init__(self, url: str, directory: Path) -> None:
        """url: of the server. directory: an empty one for its data."""
        assert PROMETHEUS is not None
        target = {"targets": [url.removeprefix("http://").rstrip("/")]}
        job = {"job_name": "serve-llm", "scrape_interval": f"{SCRAPE_SECONDS}s", "static_configs": [target]}
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
        """The series of a PromQL expression between two Unix times, a value each second."""
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
    """All panels of the dashboards, with what their queries have found since `start`, in Unix seconds."""
    now = time.time()
    found = []
    for dashboard in dashboards():
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


class Load:
    """Clients of a server, and what goes wrong there, until it is left."""

    def __init__(self, daemon: Daemon) -> None:
        self._url = daemon.url.rstrip("/")
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def burst(self) -> None:
        """Ask for more at once than the queue holds."""
        body = {"prompt": [SOURCE] * 4, "max_tokens": 8}
        with ThreadPoolExecutor(BURST) as executor:
            list(executor.map(lambda _: self._post("/v1/completions", body), range(BURST)))

    def _ask(self, client: int) -> None:
        for number in itertools.count():
            if self._is_over.is_set():
                return
            seed = 1000 * client + number
            length = 10 + 23 * seed % 90
            prompt = SOURCE * (1 + number % 4) + f"# {seed}\n"
            self._post("/v1/completions", {"prompt": prompt, "max_tokens": length, "n": 1 + seed % 2, "seed": seed})
            messages = [{"role": "user", "content": f"def sort(items{number % 7})"}]
            self._post("/v1/chat/completions", {"messages": messages, "max_tokens": length, "seed": seed})
            self._post("/v1/responses", {"input": prompt, "max_output_tokens": length})
            if number % 5 == 0:
                self._post("/v1/completions", {"prompt": prompt, "n": 0})  # refused

    def _post(self, path: str, body: dict[str, object]) -> None:
        content = json.dumps(body | {"model": "demo"}).encode()
        request = urllib.request.Request(self._url + path, content, {"content-type": "application/json"})
        with (
            contextlib.suppress(urllib.error.HTTPError),
            urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer,
        ):
            answer.read()


@contextlib.contextmanager
def run_under_load(directory: Path, seconds: float = 0.0) -> Iterator[list[Panel]]:
    """Yields all panels once each of their queries has data, or WAIT_SECONDS are over, but not before `seconds`."""
    with Daemon(*OPTIONS) as daemon:
        daemon.wait_until_serving()
        with Prometheus(daemon.url, directory) as prometheus, Load(daemon) as load:
            start = time.time()
            panels = read_panels(prometheus, start)
            while not any(line.points for lines in panels[1].series.values() for line in lines):
                panels = read_panels(prometheus, start)
            load.burst()
            os.kill(daemon.engine_pids()[-1], signal.SIGKILL)
            while time.time() < start + seconds or any(panel.empty_queries for panel in panels):
                panels = read_panels(prometheus, start)
                if time.time() > start + WAIT_SECONDS:
                    break
        yield panels
