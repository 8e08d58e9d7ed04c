"""`serve-llm scale` on a real server with two front ends: engines come and go under load, and no client notices."""

from __future__ import annotations

import os
import subprocess
import urllib.request

import psutil
import pytest

from support.daemon import SERVE_LLM, Daemon
from support.front_end_load import Clients, read_status

KEY = "admin:test"
HEADERS = {"authorization": f"Bearer {KEY}"}
OPTIONS = ("--front-ends", "2", "--data-parallel-max", "3", "--kv-cache-memory", "64MiB", "--api-key", KEY)


def scale(daemon: Daemon, *arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    command = [SERVE_LLM, "scale", daemon.wait_until_serving(), "--api-key", key, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def read_metric(daemon: Daemon, name: str) -> dict[str, float]:
    """Return the samples of one metric, by their labels."""
    request = urllib.request.Request(daemon.url + "/metrics", headers=HEADERS)
    with urllib.request.urlopen(request, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    rows = [line.rpartition(" ") for line in lines if line.startswith(name)]
    return {labels: float(value) for labels, _, value in rows}


@pytest.mark.slow
def test_engines_come_and_go_under_load_and_no_client_notices() -> None:
    with Daemon("demo", *OPTIONS) as daemon:
        refused = scale(daemon, "--data-parallel-size", "4")
        assert refused.returncode and "4 is not between 1 (--data-parallel-min) and 3" in refused.stderr
        with Clients(daemon, 6, (4, 24, 1000), headers=HEADERS) as clients:
            clients.wait_for(6)
            grown = scale(daemon, "--data-parallel-size", "3")
            assert grown.returncode == 0 and grown.stdout.endswith("\n3 engines serve\n"), grown.stderr
            added = daemon.engine_pids()[1:]
            assert len(added) == 2
            clients.wait_for(40)
            generated = read_metric(daemon, "serve_llm_generation_tokens_total")
            assert len(generated) == 3 and all(generated.values()), "all engines work for both front ends"
            processes = [psutil.Process(pid) for pid in added]
            shrunk = scale(daemon, "--data-parallel-size", "1", "--drain-timeout", "0.01")
            assert shrunk.returncode == 0 and shrunk.stdout.endswith("1 engine serves\n"), shrunk.stderr
            assert psutil.wait_procs(processes, timeout=10)[1] == []
            clients.wait_for(10)
        assert not clients.load.wrong and not clients.load.lost
        assert sum(read_metric(daemon, "serve_llm_replayed_requests_total").values()) > 0, "open ones have moved"
        status = read_status(daemon, HEADERS)
        assert len(status["engines"]) == 1 and status["restarts"] == 0 and status["scaling"]["error"] is None


@pytest.mark.slow
def test_an_engine_that_cannot_be_added_is_named_and_the_others_serve_on() -> None:
    with Daemon("demo", *OPTIONS) as daemon:
        daemon.wait_until_serving()
        adding = subprocess.Popen(
            [SERVE_LLM, "scale", daemon.url, "--api-key", KEY, "-dp", "2"], stderr=subprocess.PIPE, text=True
        )
        while len(pids := daemon.engine_pids()) < 2:
            assert adding.poll() is None
        os.kill(pids[1], 9)
        _, error = adding.communicate(timeout=60)
        assert adding.returncode and "1 engine serves, as before: engine 1: the engine process" in error
        with Clients(daemon, 1, (4,), num_requests=2, headers=HEADERS) as clients:
            pass
        assert not clients.load.wrong and not clients.load.lost
        assert scale(daemon, "-dp", "2").returncode == 0, "the next attempt succeeds"
