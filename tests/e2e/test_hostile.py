"""Every hostile request of the corpus gets a 4xx within seconds, while another stream continues; nothing dies."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from support.daemon import Daemon
from support.hostile import Case, cases, classifier_cases
from support.hostile_agents import agent_cases
from support.hostile_batches import batch_cases
from support.hostile_grammars import grammar_cases, tool_cases
from support.tools import TEMPLATE

SECONDS = 20.0  # time for an answer: nothing hangs, however busy the machine is
GAP_SECONDS = 0.25  # limit for 99 % of a stream's gaps
GROWTH_BYTES = 400 * 2**20  # memory of the server process, with two bodies of 16 MiB in progress and their results


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    template = tmp_path_factory.mktemp("hostile") / "tools.jinja"
    template.write_text(TEMPLATE)
    options = ("--trust-request-chat-template", "--chat-template", str(template), "--dialect", "hermes")
    options += ("--runner", "generate", "--convert", "embed", "--responses-store", "memory")
    options += ("--batches-dir", str(tmp_path_factory.mktemp("batches")))
    with Daemon("demo", *options, environ={"OMP_NUM_THREADS": "1"}) as daemon:
        daemon.wait_until_serving()
        yield daemon


def answer(address: tuple[str, int], case: Case) -> tuple[int, bytes, float]:
    """Send a request. Returns (status, body, seconds)."""
    lines = [f"{case.method} {case.path} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in case.headers]
    if not any(name == "Content-Length" for name, _ in case.headers):
        lines.append(f"Content-Length: {len(case.body)}")
    began = time.monotonic()
    with socket.create_connection(address, timeout=30) as client:
        try:
            client.sendall("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + case.body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has already answered, and reads no more
        response = http.client.HTTPResponse(client, method=case.method)
        response.begin()
        return response.status, response.read(), time.monotonic() - began


class Canary(threading.Thread):
    """Runs one stream after another until stopped; `gaps` in seconds."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(daemon=True)
        self._address = address
        self.gaps: list[float] = []
        self.failure = ""
        self.stopping = threading.Event()

    def run(self) -> None:
        body = json.dumps({"prompt": "import", "max_tokens": 500, "ignore_eos": True, "stream": True})
        while not self.stopping.is_set() and not self.failure:
            connection = http.client.HTTPConnection(*self._address, timeout=60)
            connection.request("POST", "/v1/completions", body)
            response = connection.getresponse()
            last, ended = time.monotonic(), False
            for line in response:
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    self.gaps.append(now - last)
                    last = now
                ended = ended or line == b"data: [DONE]\n"
                if line.startswith(b'data: {"error"'):
                    self.failure = line.decode()
            if not ended:
                self.failure = self.failure or "the stream broke off"
            connection.close()

    def percentile(self, number: int) -> float:
        """Return the 99th percentile of the gaps so far, once there are enough, and clear them."""
        while len(self.gaps) < number and self.is_alive():
            time.sleep(0.05)
        found, self.gaps = self.gaps, []
        assert not self.failure and len(found) >= number, self.failure
        return sorted(found)[int(0.99 * len(found))]

    def stop(self) -> float:
        """Return the 99th percentile of the gaps. Raises AssertionError if a stream did not end well."""
        self.stopping.set()
        self.join(60)
        return self.percentile(200)


def is_an_error(path: str, body: dict[str, Any]) -> bool:
    """Return whether a body has the error format that clients of this path read."""
    if path.startswith("/v1/messages"):
        return set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}
    return set(body["error"]) == {"message", "type", "param", "code"}


def peak_growth(process: psutil.Process, stop: threading.Event, found: list[int]) -> None:
    before = process.memory_info().rss
    while not stop.wait(0.05):
        found.append(process.memory_info().rss - before)


@pytest.mark.slow
def test_hostile_requests_hurt_only_themselves(daemon: Daemon) -> None:
    corpus = [*cases(), *grammar_cases(), *tool_cases(), *agent_cases(), *batch_cases()]
    assert len(corpus) >= 800
    check(daemon, corpus)


def test_hostile_requests_to_a_classifier() -> None:
    options = ("--runner", "generate", "--convert", "classify", "--classifier-from-token", "a", "b")
    with Daemon("demo", *options, environ={"OMP_NUM_THREADS": "1"}) as daemon:
        daemon.wait_until_serving()
        check(daemon, classifier_cases())


def check(daemon: Daemon, corpus: list[Case]) -> None:
    host, port = daemon.url.removeprefix("http://").split(":")
    address, server = (host, int(port)), psutil.Process(daemon.process.pid)
    engine = daemon.engine_pid()
    stop, growth = threading.Event(), [0]
    watching = threading.Thread(target=peak_growth, args=(server, stop, growth), daemon=True)
    watching.start()
    canary = Canary(address)
    canary.start()
    quiet = canary.percentile(500)
    try:
        with ThreadPoolExecutor(2) as clients:
            answers = list(clients.map(lambda case: answer(address, case), corpus))
    finally:
        stop.set()
        watching.join(10)
        gap = canary.stop()
    wrong = []
    for case, (status, body, seconds) in zip(corpus, answers, strict=True):
        if status not in case.statuses or seconds > SECONDS:
            wrong.append(f"{case.name}: {status} after {seconds:.2f} s: {body[:200]!r}")
        elif status != 200 and not is_an_error(case.path, json.loads(body)):
            wrong.append(f"{case.name}: {body[:200]!r}")
    for case, (_, _, seconds) in sorted(zip(corpus, answers, strict=True), key=lambda pair: -pair[1][2])[:5]:
        print(f"{seconds:.2f} s: {case.name}")
    print(
        f"{len(corpus)} requests, canary's p99 gap {quiet * 1e3:.1f} ms before, {gap * 1e3:.1f} ms meanwhile, "
        f"memory + {max(growth) / 2**20:.0f} MiB"
    )
    assert not wrong, "\n".join(wrong)
    assert gap < GAP_SECONDS and max(growth) < GROWTH_BYTES
    assert daemon.engine_pid() == engine and daemon.process.poll() is None
    assert not any("Traceback" in line for line in daemon.log), "\n".join(daemon.log)
    assert daemon.metrics()["serve_llm_num_requests_running"] == 0
