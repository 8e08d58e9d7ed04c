"""One engine process: start it, notice its death or hang, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

import zmq

from serve_llm.common.errors import (
    ASK_LOG,
    BY_NAME,
    HINTS,
    CapacityError,
    EngineDead,
    EngineError,
    RankFailed,
    ServeError,
)
from serve_llm.common.library_variables import set_library_defaults
from serve_llm.common.options.schema import Options
from serve_llm.server.engines.client import EngineClient
from serve_llm.server.metrics.meter import Meter
from serve_llm.server.thread_pool import MORE_PROCESSES

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # time for an engine to exit when asked to, before it is killed
POLL_SECONDS = 0.5  # between two reads of an engine's heartbeat
# Consecutive polls without a new beat. Counted in polls, not seconds, because after a suspend of the whole machine
# nothing hangs.
UNRESPONSIVE_POLLS = 6  # the engine is not ready
HUNG_POLLS = 20  # the engine is killed
HUNG_STARTING_POLLS = 240  # loading a library from a slow disk blocks all threads of a process
# Default of --step-timeout: a first step may take minutes. `engine.distributed.step_channels` uses the same value.
STEP_SECONDS = 300.0
STEP_FACTOR = 20  # a step may take this many times the longest one so far, if that is more
# An engine that exits with one of these codes has sent its cause.
REPORTED_EXIT_CODES = {kind.exit_code for kind in BY_NAME.values()} - {ServeError.exit_code}
REPORT_SECONDS = 10.0  # time for that cause to arrive
STEP_GRACE_SECONDS = 5.0  # time for an engine with several ranks to report which rank is silent


class EngineDeath(NamedTuple):
    error: ServeError  # the first cause
    reason: str  # one of `server.metrics.meter.RESTART_REASONS`


def launch(address: str) -> subprocess.Popen[bytes]:
    """Start an engine process on this host that connects to `address`."""
    command = [sys.executable, "-P", "-m", "serve_llm.engine", "--connect", address]
    # Parent-death pipe: it closes when this process ends for any reason, and the engine then exits.
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=_engine_environ())


def describe_failed_launch(error: OSError | zmq.ZMQError) -> ServeError:
    """Return the error of an engine that could not even be launched: a CapacityError if what is missing may come
    back."""
    remedies = {
        errno.ENOSPC: f"free some space in {gettempdir()}, or set TMPDIR",
        errno.EDQUOT: f"free some space in {gettempdir()}, or set TMPDIR",
        errno.EMFILE: "raise the limit on open files (ulimit -n)",
        errno.ENFILE: "raise the system's limit on open files (fs.file-max)",
        errno.EAGAIN: MORE_PROCESSES,
        errno.ENOMEM: "lower the memory that other processes take",
    }
    code = error.errno or 0
    if code not in remedies:
        return EngineError(f"an engine process cannot be launched: {error}; {ASK_LOG}")
    return CapacityError(f"an engine process cannot be launched: {os.strerror(code)}; {remedies[code]}")


def _engine_environ() -> dict[str, str]:
    """Build an engine's environment: omit the OMP_NUM_THREADS=1 that Ray sets in its workers, unless the user set
    it."""
    environ = dict(os.environ)
    initial = Path("/proc/self/environ").read_bytes().split(b"\0")
    if "ray" in sys.modules and not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in initial):
        environ.pop("OMP_NUM_THREADS", None)
    set_library_defaults(environ)
    return environ


class EngineProcess:
    """An engine process, started by the constructor, and its client."""

    def __init__(
        self,
        options: Options,
        directory: str,
        index: int,
        meter: Meter,
        *,
        replaces: bool = False,
        meeting: str | None = None,
    ) -> None:
        """directory: the local checkpoint. index: among the data-parallel engines. replaces: engines have served
        before, so this one starts alone. meeting: the meeting directory of the first engine of an expert-parallel
        group; None for the first one itself. Raises CapacityError or EngineError if it cannot be launched."""
        self._options = options
        self._directory = directory
        self._index = index
        self._replaces = replaces
        self.client, self._process = self._launch(meter)
        self.meeting = (meeting or self.client.directory) if options.experts_span_engines else None
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        try:
            # Not in a thread pool: the interpreter joins pools at exit, so a running engine would block the exit.
            threading.Thread(target=self._wait_for_exit, args=(loop,), daemon=True).start()
        except RuntimeError:  # the system allows no further thread
            self._kill()
            self._process.wait()
            self.client.close()
            raise self._add_index(describe_failed_launch(OSError(errno.EAGAIN, ""))) from None
        self._running: asyncio.Future[None] | None = None  # EngineClient.run

    def _launch(self, meter: Meter) -> tuple[EngineClient, subprocess.Popen[bytes]]:
        client = None
        try:
            client = EngineClient(meter)
            return client, launch(client.address)
        except (OSError, zmq.ZMQError) as error:
            if client is not None:
                client.close()
            raise self._add_index(describe_failed_launch(error)) from None

    def _wait_for_exit(self, loop: asyncio.AbstractEventLoop) -> None:
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        # Ranks exit when they notice that the engine is gone, but a stopped (SIGSTOP) rank notices nothing. The process
        # is not reaped yet, so the id of its process group cannot have been reused.
        self._kill()
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(self._ended.set_result, None)

    def _kill(self) -> None:
        """Kill the process and its ranks. Popen.kill would reap a process that has exited, which frees its id."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def start(self) -> None:
        """Wait until the engine is ready. Raises EngineDead, or the engine's ServeError if it failed."""
        starting = asyncio.ensure_future(
            self.client.start(
                self._options, self._directory, self._index, replaces=self._replaces, meeting=self.meeting
            )
        )
        watching = asyncio.ensure_future(self._watch_heartbeat(HUNG_STARTING_POLLS))
        awaited: list[asyncio.Future[Any]] = [starting, watching, self._ended]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                raise watching.result().error
            if not starting.done():  # the process has exited, but its last message may still arrive
                await asyncio.wait([starting], timeout=self._last_message_seconds())
        finally:
            has_answered = starting.done()
            starting.cancel()
            watching.cancel()
        if not has_answered:
            raise self._describe_exit("while starting").error
        try:
            starting.result()
        except ServeError as error:
            raise self._add_index(error) from None
        self.client.responds = True
        self._running = asyncio.ensure_future(self.client.run())

    async def watch(self) -> EngineDeath:
        """Return once the engine has died, or was killed because it hung. Its client delivers nothing after that."""
        assert self._running is not None, "start() comes first"
        watches = [asyncio.ensure_future(self._watch_heartbeat(HUNG_POLLS)), asyncio.ensure_future(self._watch_steps())]
        awaited: list[asyncio.Future[Any]] = [*watches, self._running, self._ended]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            death = next((watch.result() for watch in watches if watch.done()), None)
        finally:
            for watch in watches:
                watch.cancel()
        if death is not None:
            self._kill()
        else:
            await asyncio.wait([self._running], timeout=self._last_message_seconds())
            death = self._find_reported_failure() or self._describe_exit("while serving")
        self.client.fail(death.error)
        return death

    async def _watch_heartbeat(self, limit: int) -> EngineDeath:
        """Return after `limit` consecutive polls without a new beat."""
        last = -1
        num_silent = 0
        while num_silent < limit:
            await asyncio.sleep(POLL_SECONDS)
            beats = self.client.heartbeat.read().beats
            num_silent = num_silent + 1 if beats == last else 0
            last = beats
            self.client.responds = num_silent < UNRESPONSIVE_POLLS
        seconds = limit * POLL_SECONDS
        text = f"the engine process {self._process.pid} hangs: no heartbeat for {seconds:.0f} s"
        return EngineDeath(self._add_index(EngineDead(text)), "hung")

    async def _watch_steps(self) -> EngineDeath:
        """Return when a step exceeds the step timeout."""
        timeout = self._options.step_timeout
        num_ranks = self._options.tensor_parallel_size * self._options.pipeline_parallel_size
        grace = STEP_GRACE_SECONDS if num_ranks > 1 else 0.0
        step_start = 0.0
        seconds = 0.0  # time that the current step has taken so far
        limit = math.inf
        while seconds <= limit + grace:
            await asyncio.sleep(POLL_SECONDS)
            reading = self.client.heartbeat.read()
            limit = max(STEP_SECONDS, STEP_FACTOR * reading.longest) if timeout is None else timeout
            seconds = seconds + POLL_SECONDS if reading.since and reading.since == step_start else 0.0
            step_start = reading.since
        text = f"the engine process {self._process.pid} hangs in a step: no result for {limit:.0f} s (--step-timeout)"
        return EngineDeath(self._add_index(EngineDead(text)), "step_timeout")

    def _last_message_seconds(self) -> float:
        """Time to wait for the last message of an engine that exited. It is there already unless this machine is busy.
        An engine killed by a signal had no time to send one."""
        code = self._process.returncode
        if code in REPORTED_EXIT_CODES:
            return REPORT_SECONDS
        return 0.5 if code is None or code >= 0 else 0.05

    def _find_reported_failure(self) -> EngineDeath | None:
        """The failure that the engine reported or that its messages caused here, if any."""
        assert self._running is not None
        error = self._running.exception() if self._running.done() else None
        if error is None:
            return None
        if not isinstance(error, ServeError):
            logger.error("the engine's messages could not be handled", exc_info=error)
            error = EngineError(f"the engine's messages could not be handled: {type(error).__name__}: {error}")
        return EngineDeath(self._add_index(error), "rank" if isinstance(error, RankFailed) else "failed")

    def _describe_exit(self, phase: str) -> EngineDeath:
        code = self._process.returncode
        exited = code is None or code >= 0
        how = f"exit code {code}" if exited else f"signal {signal.Signals(-code).name}"
        error = EngineDead(f"the engine process {self._process.pid} died {phase} by {how}; {HINTS.get(how, ASK_LOG)}")
        return EngineDeath(self._add_index(error), "exited" if exited else "killed")

    def _add_index(self, error: ServeError) -> ServeError:
        """Add the engine's index to the message if there are several."""
        return type(error)(f"engine {self._index}: {error}") if self._options.max_engines > 1 else error

    async def stop(self, patience: float = STOP_SECONDS) -> None:
        """Ask the process to exit and kill it after `patience` seconds, or immediately if it is still starting.
        Idempotent."""
        if not self._ended.done() and self.client.ready:
            self.client.shut_down()
            await asyncio.wait([self._ended], timeout=patience)
            if not self._ended.done():
                logger.warning("engine process %d did not stop within %g s: killed", self._process.pid, patience)
        if not self._ended.done():
            self._kill()
        await asyncio.wait([self._ended])  # awaiting the future itself would cancel it together with this task
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._running
        self.client.fail(EngineDead("the engine was stopped"))
        self.client.close()
