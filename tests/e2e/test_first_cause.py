"""Whatever fails, the last line on stderr names the cause, the place and the remedy, the exit code is that of its class
(docs/reliability.md), there is no traceback unless it is a bug, and no process is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from serve_llm.common.errors import EngineError
from serve_llm.common.hub import resolve_model
from support.daemon import SERVE_LLM, Daemon
from support.faults import FAULTS, RAISER, STARVER
from support.first_causes import ALL, ONE, TWO, Fault
from support.matrix import mostly_slow

END_SECONDS = 120.0  # for a daemon that cannot start, on a busy machine
FAST = (
    "an unknown option",
    "no such directory",
    "config.json cut short",
    "a cache larger than the memory",
    "an engine that is killed while it starts",
    "a rank that is killed while it starts",
)
MARK = "FIRST_CAUSE_TEST"  # a variable that all processes of a daemon inherit


def marked(mark: str) -> list[psutil.Process]:
    """Return all processes, direct children or not, with this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:  # it ended, or is another user's
            continue
    return found


def nobody_is_left(mark: str) -> bool:
    """Wait some seconds until all are gone: a killed process disappears with a delay."""
    _, alive = psutil.wait_procs(marked(mark), timeout=5)
    return not alive


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """Yield a port with a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, taken: int
) -> Iterator[dict[str, Future[None]]]:
    """Yield the outcome of every requested fault by name. Runs two at a time, because each mostly waits for
    processes."""
    faults = [item.callspec.params.get("fault") for item in request.session.items if hasattr(item, "callspec")]
    with ThreadPoolExecutor(2) as pool:
        chosen = [fault for fault in faults if isinstance(fault, Fault)]
        yield {
            fault.name: pool.submit(start_with, fault, tmp_path_factory.mktemp("fault") / "model", taken)
            for fault in chosen
        }
        pool.shutdown(cancel_futures=True)  # after the first failure of `pytest -x`


def start_with(fault: Fault, model: Path, taken: int) -> None:
    """Run a fault. model: where the demo checkpoint is copied, to be damaged. taken: a port."""
    shutil.copytree(resolve_model("demo"), model, ignore=shutil.ignore_patterns("__pycache__"))
    fault.damage(model)
    arguments = [argument.format(model=model, port=taken) for argument in fault.arguments]
    arguments += [] if "--port" in arguments else ["--port", "0"]
    mark = uuid.uuid4().hex
    environ = os.environ | fault.environ | {MARK: mark}
    done = subprocess.run([SERVE_LLM, *arguments], capture_output=True, text=True, timeout=END_SECONDS, env=environ)
    pattern = fault.line.replace("{model}", re.escape(str(model))).replace("{port}", str(taken))
    assert re.fullmatch(f"serve-llm: {pattern}", done.stderr.splitlines()[-1]), done.stderr
    assert done.returncode == fault.code and done.stdout == ""
    assert fault.is_bug == ("Traceback" in done.stderr)
    assert nobody_is_left(mark)


@pytest.mark.parametrize(
    "fault", mostly_slow(ALL, [fault for fault in ALL if fault.name in FAST]), ids=lambda fault: fault.name
)
def test_at_start(fault: Fault, outcomes: dict[str, Future[None]]) -> None:
    outcomes[fault.name].result()


def complete(url: str, prompt: list[int] | str) -> int:
    """Return the status of a short completion."""
    body = json.dumps({"model": "demo", "prompt": prompt, "max_tokens": 4}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=END_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "token", "line", "is_bug"),
    [
        (
            ONE,
            STARVER,
            "out of memory in a step: CUDA out of memory. Tried .*; lower --max-num-batched-tokens.*",
            False,
        ),
        pytest.param(
            TWO,
            RAISER,
            r"rank [01] \(host \S+, pid \d+\) failed in a step: MemoryError: simulated",
            True,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a GPU that is full in a step", "a rank that fails in a step"],
)
def test_past_the_last_restart(arguments: tuple[str, ...], token: int, line: str, is_bug: bool) -> None:
    mark = uuid.uuid4().hex
    with Daemon(*arguments, "--max-restarts", "0", environ=FAULTS | {MARK: mark}) as daemon:
        assert complete(daemon.wait_until_serving(), [5, token, 6]) == 500
        assert daemon.wait() == EngineError.exit_code
        assert re.fullmatch(f"serve-llm: {line}", daemon.log[-1]), daemon.log
        assert is_bug == any("Traceback" in entry for entry in daemon.log)
    assert nobody_is_left(mark)


@pytest.mark.slow
def test_a_log_that_cannot_be_written_ends_nothing(taken: int) -> None:
    """As on a full disk: the service continues, and a failed start has the exit code of its cause."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with open("/dev/full", "w") as full:
        failed = subprocess.Popen([SERVE_LLM, "demo", "--port", str(taken)], stderr=full)
        process = subprocess.Popen([SERVE_LLM, *ONE, "--port", str(port)], stderr=full)
    try:
        assert failed.wait(END_SECONDS) == 2
        deadline = time.monotonic() + END_SECONDS
        while (status := ready(url)) != 200:
            assert process.poll() is None and time.monotonic() < deadline, status
            time.sleep(0.05)
        assert complete(url, "import") == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def ready(url: str) -> int | None:
    """Return the status of /ready, None while nothing listens."""
    try:
        with urllib.request.urlopen(url + "/ready", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except urllib.error.URLError:
        return None
