"""A server under a load that gives each panel of the Grafana dashboards something to show."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.daemon import Daemon
from support.dashboard_panels import WAIT_SECONDS, Panel, Prometheus, read_panels

# Two engines, one of which is killed; a queue that fills up quickly; drafts; and whatever other panels need.
OPTIONS = ("demo", "-dp", "2", "--max-queue", "8", "--max-num-seqs", "4", "--responses-store", "memory")
OPTIONS += ("--speculative-config", '{"method": "ngram"}', "--kv-offload-memory", "16MiB")
OPTIONS += ("--kv-cache-memory", "7MiB")
NUM_CLIENTS = 5
BURST = 60  # simultaneous requests, some of which are refused
SOURCE = "def area(width, height):\n    return width * height\n\n"


class Load:
    """Clients of a server, and faults, until the block ends."""

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
        """Send more requests at once than the queue holds."""
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
    """Yield all panels once each of their queries has data, or WAIT_SECONDS are over, but not before `seconds`."""
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
