"""Hang detection: an idle process with a scripted heartbeat."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import zmq

from serve_llm.common.errors import CapacityError, EngineError, RankFailed, ServeError
from serve_llm.common.heartbeat import HeartbeatReading
from serve_llm.common.options.sources import make_options
from serve_llm.server.engines import client as client_module
from serve_llm.server.engines import process as process_module
from serve_llm.server.engines import restarts
from serve_llm.server.engines.process import EngineDeath, EngineProcess
from serve_llm.server.engines.supervisor import Supervisor
from serve_llm.server.metrics.meter import Clock, Meter
from support.fakes import make_model_info

POLL_SECONDS = 0.001


@pytest.fixture(autouse=True)
def idle_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(address: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", "exit(int(input()))"], stdin=subprocess.PIPE, start_new_session=True
        )

    monkeypatch.setattr(process_module, "launch", launch)
    monkeypatch.setattr(process_module, "POLL_SECONDS", POLL_SECONDS)
    monkeypatch.setattr(process_module, "STEP_SECONDS", 10 * POLL_SECONDS)
    monkeypatch.setattr(process_module, "STEP_GRACE_SECONDS", 5 * POLL_SECONDS)


class ReadingsExhaustedError(Exception):
    """The scripted heartbeat has no further readings."""


class ScriptedHeartbeat:
    """Returns one reading per poll."""

    def __init__(self, readings: Sequence[HeartbeatReading]) -> None:
        self._readings = list(readings)

    def read(self) -> HeartbeatReading:
        if not self._readings:
            raise ReadingsExhaustedError
        return self._readings.pop(0)

    def close(self) -> None:
        pass


def watch(what: str, readings: Sequence[HeartbeatReading], **options: object) -> tuple[EngineDeath | None, bool]:
    """Run a watch. Returns the death it found, if any, and whether the engine counts as responsive at the end."""

    async def run() -> tuple[EngineDeath | None, bool]:
        engine = EngineProcess(make_options("demo", device="cpu", **options), "/model", 0, Meter(Clock()))
        engine.client.heartbeat.close()
        engine.client.heartbeat = ScriptedHeartbeat(readings)  # type: ignore[assignment]
        try:
            death = await (engine._watch_steps() if what == "steps" else engine._watch_heartbeat(6))
        except ReadingsExhaustedError:
            death = None
        finally:
            responds = engine.client.responds
            await engine.stop()
        return death, responds

    return asyncio.run(run())


def beats(*numbers: int) -> list[HeartbeatReading]:
    return [HeartbeatReading(number, 0.0, 0.0, 0) for number in numbers]


def since(*starts: float, longest: float = 0.0) -> list[HeartbeatReading]:
    """Readings of steps that began at these times; 0: no step is in progress."""
    return [HeartbeatReading(1, start, longest, 1) for start in starts]


def test_an_engine_hangs_after_consecutive_polls_without_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "UNRESPONSIVE_POLLS", 3)
    death, responds = watch("beats", beats(*[7] * 7))
    assert death is not None and death.reason == "hung" and "hangs: no heartbeat for 0 s" in str(death.error)
    assert not responds
    assert watch("beats", beats(*[7] * 6, 8, *[8] * 5, 9)) == (None, True)
    assert watch("beats", beats(*[7] * 4)) == (None, False), "not ready before it counts as hung"


def test_a_step_without_a_result_hangs_and_many_short_steps_do_not() -> None:
    death, _ = watch("steps", since(*[5.0] * 12))
    assert death is not None and death.reason == "step_timeout" and "hangs in a step" in str(death.error)
    for well in (since(*range(1, 100)), since(*[0.0] * 99), since(*[5.0] * 9, 6.0, *[6.0] * 9, 0.0)):
        assert watch("steps", well) == (None, True)


def test_the_step_limit_grows_with_the_longest_step_unless_it_is_set() -> None:
    slow = since(*[5.0] * 99, longest=6 * POLL_SECONDS)  # the limit is 20 times `longest`, 120 polls
    assert watch("steps", slow) == (None, True)
    assert watch("steps", [*slow, *slow])[0] is not None
    assert watch("steps", slow, step_timeout=20 * POLL_SECONDS)[0] is not None


def test_an_engine_with_several_ranks_has_time_to_report_the_silent_one() -> None:
    assert watch("steps", since(*[5.0] * 13), tensor_parallel_size=2) == (None, True)
    assert watch("steps", since(*[5.0] * 20), tensor_parallel_size=2)[0] is not None


def test_a_process_that_exits_while_starting_is_reported_at_once() -> None:
    async def run() -> None:
        engine = EngineProcess(make_options("demo"), "/model", 0, Meter(Clock()))
        assert engine._process.stdin is not None
        engine._process.stdin.close()
        with pytest.raises(process_module.EngineDead, match=r"died while starting by exit code 1; the server's log"):
            await engine.start()
        await engine.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("code", "cause"), [(5, "rank 2 died"), (1, "died while serving by exit code 1")])
def test_the_cause_of_an_engine_that_reported_it_is_awaited_on_a_busy_machine(code: int, cause: str) -> None:
    async def run() -> None:
        engine = EngineProcess(make_options("demo"), "/model", 0, Meter(Clock()))
        loop = asyncio.get_running_loop()
        engine._running = reported = loop.create_future()
        assert engine._process.stdin is not None
        engine._process.stdin.write(b"%d" % code)
        engine._process.stdin.close()
        await engine._ended
        loop.call_later(0.6, lambda: reported.done() or reported.set_exception(RankFailed("rank 2 died")))
        death = await engine.watch()
        assert cause in str(death.error)
        await engine.stop()

    asyncio.run(run())


def test_engines_start_with_what_their_libraries_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "MKL_CBWR"):
        monkeypatch.delenv(name, raising=False)
    environ = process_module._engine_environ()
    assert environ["MKL_CBWR"] == "AUTO,STRICT"
    assert environ.get("OMP_WAIT_POLICY") == ("passive" if find_spec("serve_llm.kernels.cpu.compiled") else None)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert process_module._engine_environ()["OMP_WAIT_POLICY"] == "active"


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("module", "name", "error", "kind", "message"),
    [
        (client_module, "Heartbeat", NO_SPACE, CapacityError, "No space left on device; free some space in "),
        (client_module._CONTEXT, "socket", zmq.ZMQError(errno.EMFILE), CapacityError, "Too many open files; raise the"),
        (
            process_module,
            "launch",
            BlockingIOError(errno.EAGAIN, "fork"),
            CapacityError,
            "unavailable; raise the limit",
        ),
        (process_module, "launch", FileNotFoundError(errno.ENOENT, "gone"), EngineError, "gone; the server's log may"),
        (threading.Thread, "start", RuntimeError("can't start new thread"), CapacityError, "limit on processes"),
    ],
    ids=["disk", "files", "processes", "interpreter", "threads"],
)
def test_a_process_that_cannot_be_launched_is_an_error_that_leaves_nothing(
    module: Any,
    name: str,
    error: Exception,
    kind: type[ServeError],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    async def run() -> None:
        with pytest.raises(kind, match=f"^an engine process cannot be launched: .*{message}"):
            EngineProcess(make_options("demo"), "/model", 0, Meter(Clock()))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, name, fail)
    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_a_process_may_be_stopped_twice() -> None:
    async def run() -> None:
        engine = EngineProcess(make_options("demo"), "/model", 0, Meter(Clock()))
        await engine.stop()
        await engine.stop()

    asyncio.run(run())


def test_a_replacement_that_cannot_be_launched_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor stops the dead engine again before the second attempt."""
    launch = process_module.launch
    launched: list[subprocess.Popen[bytes]] = []
    failures: list[OSError] = []

    def launch_or_fail(address: str) -> subprocess.Popen[bytes]:
        if len(launched) == 1 and not failures:
            failures.append(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            raise failures[0]
        launched.append(launch(address))
        return launched[-1]

    async def become_ready(engine: EngineProcess) -> None:
        engine.client._model_info = make_model_info()
        engine._running = asyncio.get_running_loop().create_future()

    monkeypatch.setattr(process_module, "launch", launch_or_fail)
    monkeypatch.setattr(EngineProcess, "start", become_ready)
    monkeypatch.setattr(process_module, "POLL_SECONDS", 60.0)  # nothing hangs
    monkeypatch.setattr(restarts, "FIRST_PAUSE", 0.0)

    async def run() -> None:
        supervisor = Supervisor(make_options("demo", device="cpu"), "/model")
        await supervisor.start()
        launched[0].kill()
        replacing = asyncio.ensure_future(supervisor.watch())
        while len(launched) < 2 or not supervisor.replicas.ready:
            if replacing.done():
                raise await replacing
            await asyncio.sleep(0)
        assert len(launched) == 2 and len(failures) == 1
        assert "Too many open files" in str(supervisor.replicas.first_cause)
        replacing.cancel()
        await supervisor.stop(0.0)
        await supervisor.stop(0.0)

    asyncio.run(asyncio.wait_for(run(), 60))
