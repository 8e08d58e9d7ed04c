"""The daemon's life: start, failures at start, drain, and the end of its engine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from support.daemon import SERVE_LLM, Daemon

LONG = {"model": "demo", "prompt": "import", "max_tokens": 40, "ignore_eos": True, "stream": True}


@contextlib.contextmanager
def post(url: str, body: dict[str, object]) -> Iterator[http.client.HTTPResponse]:
    """Send a request; enter the block when the first byte of the answer has arrived."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body))
        with connection.getresponse() as answer:
            yield answer


def events(answer: http.client.HTTPResponse) -> list[str]:
    return [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: ")]


def test_start_up_log_says_what_fits_and_where() -> None:
    with Daemon("demo", "--max-model-len", "512", "--kv-cache-memory", "64MiB") as daemon:
        daemon.wait_until_serving()
        log = "\n".join(daemon.log)
        line = r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] "
        assert re.search(line + r"Listening on http://127\.0\.0\.1:\d+; loading demo$", daemon.log[0])
        assert "set --api-key" not in log, "only this host reaches it"
        assert re.search(line + r"CPU KV cache size: [\d,]+ tokens", log)
        assert re.search(line + r"Maximum concurrency for 512 tokens per request: \d+\.\d\dx", log)
        assert re.search(line + r"Weights loaded and packed in [\d.]+ s", log)
        assert status(daemon.url + "/ready") == 200


@pytest.mark.parametrize("key", [(), ("--api-key", "k")])
def test_a_server_that_other_hosts_reach_warns_without_a_key(key: tuple[str, ...]) -> None:
    with Daemon("demo", "--host", "0.0.0.0", *key) as daemon:
        daemon.wait_until_logged("Listening on")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    warned = [entry for entry in daemon.log if entry.startswith("WARNING")]
    assert len(warned) == (0 if key else 1) and all("set --api-key" in entry for entry in warned)
    assert daemon.log[-1].endswith("Stopped")


def status(url: str) -> int:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return int(answer.status)


def test_a_signal_drains_and_the_exit_is_clean() -> None:
    with Daemon("demo") as daemon, post(daemon.wait_until_serving(), LONG | {"max_tokens": 1000}) as answer:
        first = answer.readline()
        daemon.signal(signal.SIGTERM)
        rest = events(answer)
        assert first.startswith(b"data: ") and rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
        assert daemon.wait() == 0
        assert any("Stopping: open requests (1) have" in entry for entry in daemon.log)
        assert not any("Traceback" in entry for entry in daemon.log)


@pytest.mark.slow
def test_while_draining_new_requests_are_refused() -> None:
    with Daemon("demo") as daemon, post(url := daemon.wait_until_serving(), LONG | {"max_tokens": 2000}) as answer:
        answer.readline()
        daemon.signal(signal.SIGINT)
        while not any("Stopping" in entry for entry in daemon.log):
            answer.readline()
        for path in ("/ready", "/v1/completions"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url + path, data=None if path == "/ready" else b'{"prompt": "x"}', timeout=10)
            with refused.value as answered:
                assert answered.code == 503 and int(answered.headers["Retry-After"]) > 0
                assert json.loads(answered.read())["error"]["message"]
        daemon.signal(signal.SIGINT)  # the second one ends the drain
        assert daemon.wait(5) == 0


def lives(process: psutil.Process) -> bool:
    """Return whether the process is alive. A zombie that its new parent has not reaped yet does not count."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_what_does_not_finish_in_time_is_ended_with_the_reason() -> None:
    with Daemon("demo", "--drain-timeout", "0.2") as daemon:
        with post(daemon.wait_until_serving(), LONG | {"max_tokens": 2000}) as answer:
            answer.readline()
            children = psutil.Process(daemon.process.pid).children(recursive=True)
            daemon.signal(signal.SIGTERM)
            rest = events(answer)
        assert rest[-1] == "[DONE]" and "shutting down" in json.loads(rest[-2])["error"]["message"]
        assert daemon.wait() == 0
        assert not [child for child in children if lives(child)]


@pytest.mark.slow
def test_a_second_signal_ends_everything_within_two_seconds() -> None:
    """Even with a stream that nobody reads, and an engine that does not respond."""
    with Daemon("demo") as daemon, post(url := daemon.wait_until_serving(), LONG | {"max_tokens": 2000}) as answer:
        answer.readline()
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        with post(url, LONG | {"max_tokens": 2000}):
            os.kill(daemon.engine_pid(), signal.SIGSTOP)
            daemon.signal(signal.SIGTERM)
            daemon.wait_until_logged(r"Stopping: open requests \(2\) have 30 s to finish")
            began = time.monotonic()
            daemon.signal(signal.SIGTERM)
            assert daemon.wait() == 0 and time.monotonic() - began < 10  # 2 s plus a busy machine's delay, not 30
        assert not [child for child in children if lives(child)]


def test_without_restarts_the_engines_death_ends_streams_with_an_error_and_the_daemon_with_the_cause() -> None:
    with (
        Daemon("demo", "--max-restarts", "0") as daemon,
        post(daemon.wait_until_serving(), LONG | {"max_tokens": 2000}) as answer,
    ):
        answer.readline()
        os.kill(daemon.engine_pid(), signal.SIGKILL)
        rest = events(answer)
        assert "SIGKILL" in json.loads(rest[-2])["error"]["message"] and rest[-1] == "[DONE]"
        assert daemon.wait() == 5
        assert re.search(r"^serve-llm: the engine process \d+ died while serving by signal SIGKILL", daemon.log[-1])


def test_a_signal_while_starting_ends_engine_and_daemon() -> None:
    with Daemon("demo") as daemon:
        process = psutil.Process(daemon.process.pid)
        while not (children := process.children()):
            assert daemon.process.poll() is None
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert not psutil.pid_exists(children[0].pid)


@pytest.mark.slow
def test_a_taken_port_is_named_at_once() -> None:
    with Daemon("demo", "--load-format", "dummy") as daemon:
        port = daemon.wait_until_serving().rpartition(":")[2]
        done = subprocess.run([SERVE_LLM, "demo", "--port", port], capture_output=True, text=True, timeout=30)
        assert done.returncode == 2
        assert done.stderr.startswith(f"serve-llm: cannot listen on 127.0.0.1 port {port}: Address already in use")


@pytest.mark.slow
def test_health_answers_while_the_engine_loads() -> None:
    with Daemon("demo") as daemon:

        def connections() -> list[int]:
            return [c.laddr.port for c in psutil.Process(daemon.process.pid).net_connections() if c.status == "LISTEN"]

        ports: list[int] = []
        while not ports and daemon.process.poll() is None:
            ports = connections()
        url = f"http://127.0.0.1:{ports[0]}"
        assert status(url + "/health") == 200
        daemon.wait_until_serving()
        assert status(url + "/ready") == 200
