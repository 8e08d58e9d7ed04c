"""An engine dies, hangs or fails while streams are open: they continue with the tokens of an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import psutil
import pytest

from serve_llm import LLM, SamplingParams
from serve_llm.common.hub import resolve_model
from support.daemon import Daemon
from support.faults import FAULTS, KILLER, RAISER, SLEEPER
from support.streams import Streams, mixed

SMALL = ("demo", "--kv-cache-memory", "64MiB", "--max-restarts", "100")
LONGEST = 1200  # tokens of the longest stream, which is still open when something is killed


def restarts(daemon: Daemon, reason: str) -> float:
    with urllib.request.urlopen(daemon.url + "/metrics", timeout=10) as answer:
        found = re.findall(rf'serve_llm_restarts_total{{.*reason="{reason}".*}} (\S+)', answer.read().decode())
    return sum(map(float, found))


def status(daemon: Daemon, path: str) -> int:
    try:
        with urllib.request.urlopen(daemon.url + path, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def wait_until_ready(daemon: Daemon) -> None:
    while status(daemon, "/ready") != 200:
        assert daemon.process.poll() is None, daemon.log


def test_a_killed_engine_and_one_killed_while_it_starts() -> None:
    with Daemon(*SMALL) as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), mixed(12, LONGEST)).finish()
        first = daemon.engine_pid()
        streams = Streams(daemon.url, mixed(12, LONGEST))
        streams.wait_for(120, stopped_pid=first)
        os.kill(first, signal.SIGKILL)
        daemon.wait_until_logged("it is replaced")
        assert status(daemon, "/health") == 200 and status(daemon, "/ready") == 503
        while not (found := [pid for pid in daemon.engine_pids() if pid != first]):
            pass
        os.kill(found[0], signal.SIGKILL)
        assert streams.finish() == undisturbed
        wait_until_ready(daemon)
        assert (restarts(daemon, "killed"), restarts(daemon, "start")) == (1, 1)
        metrics = daemon.metrics()
        assert metrics["serve_llm_replayed_requests_total"] > 0 and metrics["serve_llm_recovery_seconds_count"] == 1
        assert metrics["serve_llm_generation_tokens_total"] == 2 * streams.num_tokens
        assert metrics["serve_llm_num_requests_running"] == metrics["serve_llm_num_requests_waiting"] == 0


@pytest.mark.slow
def test_a_stopped_engine_is_found_and_replaced() -> None:
    with Daemon(*SMALL) as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), mixed(12, LONGEST)).finish()
        pid = daemon.engine_pid()
        streams = Streams(daemon.url, mixed(12, LONGEST))
        streams.wait_for(120, stopped_pid=pid)
        while status(daemon, "/ready") == 200:
            pass
        assert psutil.pid_exists(pid), "not ready before it is given up"
        assert streams.finish() == undisturbed
        assert restarts(daemon, "hung") == 1 and not psutil.pid_exists(pid)


@pytest.mark.slow
def test_a_drain_waits_for_the_next_engine() -> None:
    with Daemon(*SMALL, "--drain-timeout", "120") as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), mixed(6, LONGEST)).finish()
        streams = Streams(daemon.url, mixed(6, LONGEST))
        streams.wait_for(60)
        os.kill(daemon.engine_pid(), signal.SIGKILL)
        daemon.wait_until_logged("it is replaced")
        daemon.signal(signal.SIGTERM)
        assert streams.finish() == undisturbed
        assert daemon.wait() == 0


@pytest.mark.slow
def test_neither_a_deadline_nor_the_end_waits_for_the_next_engine() -> None:
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with Daemon(*SMALL, "--request-timeout", "4") as daemon:
        streams = Streams(daemon.wait_until_serving(), [body])
        streams.wait_for(15)
        os.kill(pid := daemon.engine_pid(), signal.SIGSTOP)
        streams.finish()
        assert streams.messages[0]["error"]["code"] == "deadline_exceeded" and daemon.engine_pid() == pid
        daemon.wait_until_logged("it is replaced")
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        daemon.signal(signal.SIGTERM)  # nothing is open
        assert daemon.wait(5) == 0
        assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.mark.slow
@pytest.mark.pairs("grammar + replay", "logprobs + DP", "logprobs + replay", "n + replay", "DP + replay")
def test_replicas_take_over() -> None:
    with Daemon(*SMALL, "-dp", "2") as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), mixed(12, LONGEST)).finish()
        streams = Streams(daemon.url, mixed(12, LONGEST))
        streams.wait_for(120)
        os.kill(daemon.engine_pids()[1], signal.SIGKILL)
        daemon.wait_until_logged("engine 1: the engine process .* it is replaced")
        assert status(daemon, "/ready") == 200
        assert streams.finish() == undisturbed
        daemon.wait_until_logged("The engine is ready again")
        assert len(daemon.engine_pids()) == 2


@pytest.mark.slow
@pytest.mark.pairs("TP + replay")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_killed_or_stopped(number: signal.Signals) -> None:
    with Daemon(*SMALL, "-tp", "2") as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), mixed(12, LONGEST)).finish()
        streams = Streams(daemon.url, mixed(12, LONGEST))
        streams.wait_for(120)
        ranks = daemon.rank_pids()
        os.kill(ranks[1], number)
        assert streams.finish() == undisturbed
        assert restarts(daemon, "rank") == 1
        assert any(re.search(rf"rank 1 \(.*pid {ranks[1]}\)", line) for line in daemon.log)
        assert psutil.wait_procs([psutil.Process(pid) for pid in ranks.values() if psutil.pid_exists(pid)], 30)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("fault", "reason"), [(KILLER, "killed"), (RAISER, "failed")])
def test_the_request_that_kills_ends_with_an_error_and_all_others_finish(fault: int, reason: str, ranks: int) -> None:
    with Daemon(*SMALL, "-tp", str(ranks), environ=FAULTS) as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), mixed(12, LONGEST)).finish()
        streams = Streams(daemon.url, mixed(12, LONGEST))
        streams.wait_for(120)
        bad = Streams(daemon.url, [{"prompt": [fault], "max_tokens": 9}])
        assert bad.finish().errors == [500]
        assert "this request crashed the engine 3 times, the last time alone: " in str(bad.messages)
        assert streams.finish() == undisturbed
        assert restarts(daemon, reason if ranks == 1 else "rank") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        pytest.param(
            1,
            r"the engine process \d+ hangs in a step: no result for 2 s \(--step-timeout\); it is replaced",
            id="one rank",
        ),
        pytest.param(
            2,
            r"rank 0 \(host \S+, pid \d+\); rank 1 .*, waiting: no answer in a step for 2 s; it is replaced",
            id="two ranks",
        ),
    ],
)
def test_a_step_that_hangs(ranks: int, named: str) -> None:
    with Daemon(*SMALL, "--step-timeout", "2", "-tp", str(ranks), environ=FAULTS) as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), mixed(12, LONGEST)).finish()
        bad = Streams(daemon.url, [{"prompt": [SLEEPER], "max_tokens": 9}])
        daemon.wait_until_logged(named)
        streams = Streams(daemon.url, mixed(12, LONGEST), patiently=True)
        assert bad.finish().errors == [500]
        assert streams.finish() == undisturbed


@pytest.mark.slow
def test_clients_that_hold_all_open_files_do_not_keep_the_engine_from_being_replaced() -> None:
    with Daemon(*SMALL) as daemon, contextlib.ExitStack() as clients:
        undisturbed = Streams(daemon.wait_until_serving(), mixed(6, LONGEST)).finish()
        pid = daemon.process.pid
        limit = psutil.Process(pid).num_fds() + 60
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limit))
        streams = Streams(daemon.url, mixed(6, LONGEST))
        streams.wait_for(60, stopped_pid=daemon.engine_pid())
        address = urllib.parse.urlsplit(daemon.url)
        for _ in range(limit):
            clients.enter_context(socket.create_connection((address.hostname, address.port), timeout=60))
        daemon.wait_until_logged("Connections are refused: .* files are open")
        os.kill(daemon.engine_pid(), signal.SIGKILL)
        assert streams.finish() == undisturbed
        clients.close()
        wait_until_ready(daemon)
        assert not any("Traceback" in line for line in daemon.log)


@pytest.mark.slow
def test_a_checkpoint_that_was_replaced_ends_the_server_with_the_cause(tmp_path: Path) -> None:
    shutil.copytree(resolve_model("demo"), tmp_path / "model")
    with Daemon(str(tmp_path / "model"), *SMALL[1:], "--served-model-name", "demo") as daemon:
        streams = Streams(daemon.wait_until_serving(), mixed(6, LONGEST))
        streams.wait_for(60, stopped_pid=daemon.engine_pid())
        weights = (resolve_model("demo") / "model.safetensors").read_bytes()
        (tmp_path / "other").write_bytes(weights[: len(weights) // 2] + weights[len(weights) // 2 :][::-1])
        os.replace(tmp_path / "other", tmp_path / "model" / "model.safetensors")
        os.kill(daemon.engine_pid(), signal.SIGKILL)
        assert daemon.wait() == 3
        named = r"the checkpoint has changed since the server started \(model.safetensors\)"
        assert re.search(f"^serve-llm: {named}", daemon.log[-1])
        assert set(streams.finish().errors) == {500} and re.search(named, str(streams.messages))


def test_past_max_restarts_the_server_ends_with_the_first_cause() -> None:
    with Daemon("demo", "--max-restarts", "1") as daemon:
        streams = Streams(daemon.wait_until_serving(), [{"prompt": "import", "max_tokens": 2000, "ignore_eos": True}])
        first = daemon.engine_pid()
        os.kill(first, signal.SIGKILL)
        while not (found := [pid for pid in daemon.engine_pids() if pid != first]):
            pass
        os.kill(found[0], signal.SIGKILL)
        assert daemon.wait() == 5
        named = rf"the engine process {first} died while serving by signal SIGKILL.*; then the engine died 1 more times"
        assert re.search(rf"^serve-llm: {named}", daemon.log[-1])
        assert streams.finish().errors == [500] and re.search(named, str(streams.messages))


def test_the_offline_class_goes_on() -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    before = set(psutil.Process().children())
    with LLM("demo", kv_cache_memory="64MiB") as llm:
        (engine,) = set(psutil.Process().children()) - before
        expected = llm.generate(["import", "def"], params, use_tqdm=False)
        engine.kill()
        found = llm.generate(["import", "def"], params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
