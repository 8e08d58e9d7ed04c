"""One engine process: start it, talk to it, notice its end or its hang, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from serve_llm.engine.client import EngineClient
from serve_llm.engine.errors import ASK_LOG, HINTS, EngineDead, EngineError, RankFailed, ServeError
from serve_llm.engine.options import Options

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # for an engine that was asked to end, before it is killed
LOOK_SECONDS = 0.5  # between two looks at an engine's pulse
# Looks in a row at which there was no new beat. Looks, not seconds: when the whole machine stood still, nobody hung.
SILENT_LOOKS = 6  # then it is not ready
HUNG_LOOKS = 20  # then it is killed
HUNG_STARTING_LOOKS = 240  # a library that is loaded from a slow disk holds up all threads of its process
STEP_SECONDS = 300.0  # without --step-timeout, as in `engine.execute.steps`: a first step may well take minutes,
STEP_FACTOR = 20  # and where steps were seen to take long, one may take so many times as long
STEP_GRACE_SECONDS = 5.0  # for an engine with ranks to say itself which of them is silent


class Death(NamedTuple):
    error: ServeError  # the first cause
    reason: str  # one of `metrics.RESTART_REASONS`


def launch(address: str) -> subprocess.Popen[bytes]:
    """Start an engine process on this host that connects to `address`."""
    command = [sys.executable, "-P", "-m", "serve_llm.engine", "--connect", address]
    # The pipe is the leash: it closes when this process ends, in whatever way, and the engine then ends itself.
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env=_environ())


def _environ() -> dict[str, str]:
    """Ours, without the single thread that Ray makes each of its processes compute with, unless it was asked for."""
    environ = dict(os.environ)
    started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    if "ray" in sys.modules and not any(entry.startswith(b"OMP_NUM_THREADS=") for entry in started_with):
        environ.pop("OMP_NUM_THREADS", None)
    return environ


class EngineProcess:
    """The process, started at once, and the client that talks to it."""

    def __init__(
        self, options: Options, directory: str, index: int, *, replaces: bool = False, meeting: str | None = None
    ) -> None:
        """directory: the local checkpoint. index: among the data-parallel engines. replaces: one that has served.
        meeting: that of the first of the engines that share out experts; None: this is the first."""
        self._options = options
        self._directory = directory
        self._index = index
        self._replaces = replaces
        self.client = EngineClient()
        self.meeting = (meeting or self.client.directory) if options.experts_span_engines else None
        self._process = launch(self.client.address)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Not a pool's thread: the interpreter would wait for it at exit, and so for ever for an engine nobody stopped.
        threading.Thread(target=self._await_end, args=(asyncio.get_running_loop(),), daemon=True).start()
        self._running: asyncio.Future[None] | None = None

    def _await_end(self, loop: asyncio.AbstractEventLoop) -> None:
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        # Its ranks end when they notice that it is gone, but one that is stopped notices nothing. The process is not
        # reaped yet, so its group's number is still its own.
        self._kill()
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._ended.set_result, None)

    def _kill(self) -> None:
        """With its ranks, its children. Not by Popen, which reaps what has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def start(self) -> None:
        """Wait until the engine is ready. Raises the ServeError that it failed with, or EngineDead."""
        starting = asyncio.ensure_future(
            self.client.start(
                self._options, self._directory, self._index, replaces=self._replaces, meeting=self.meeting
            )
        )
        watching = asyncio.ensure_future(self._watch_beats(HUNG_STARTING_LOOKS))
        awaited: list[asyncio.Future[Any]] = [starting, watching, self._ended]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                raise watching.result().error
            if not starting.done():  # it died; a last message may still be on its way
                await asyncio.wait([starting], timeout=self._last_words_seconds())
        finally:
            answered = starting.done()
            starting.cancel()
            watching.cancel()
        if not answered:
            raise self._death("while starting").error
        try:
            starting.result()
        except ServeError as error:
            raise self._named(error) from None
        self.client.responds = True  # it has just said so
        self._running = asyncio.ensure_future(self.client.run())

    async def watch(self) -> Death:
        """Returns when the engine is gone, or hung and killed; nothing comes from its client any more by then."""
        assert self._running is not None, "start() comes first"
        watches = [asyncio.ensure_future(watch) for watch in (self._watch_beats(HUNG_LOOKS), self._watch_steps())]
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
            await asyncio.wait([self._running], timeout=self._last_words_seconds())
            death = self._last_words() or self._death("while serving")
        self.client.fail(death.error)
        return death

    async def _watch_beats(self, limit: int) -> Death:
        """Returns when the engine has shown at so many looks in a row no sign of life."""
        last, silent = -1, 0
        while silent < limit:
            await asyncio.sleep(LOOK_SECONDS)
            beats = self.client.pulse.read().beats
            silent = silent + 1 if beats == last else 0
            last = beats
            self.client.responds = silent < SILENT_LOOKS
        seconds = limit * LOOK_SECONDS
        text = f"the engine process {self._process.pid} hangs: no sign of life for {seconds:.0f} s"
        return Death(self._named(EngineDead(text)), "hung")

    async def _watch_steps(self) -> Death:
        """Returns when a step takes too long."""
        given, num_ranks = (
            self._options.step_timeout,
            self._options.tensor_parallel_size * self._options.pipeline_parallel_size,
        )
        grace = STEP_GRACE_SECONDS if num_ranks > 1 else 0.0
        last, seconds, limit = 0.0, 0.0, math.inf
        while seconds <= limit + grace:
            await asyncio.sleep(LOOK_SECONDS)
            seen = self.client.pulse.read()
            limit = max(STEP_SECONDS, STEP_FACTOR * seen.longest) if given is None else given
            seconds = seconds + LOOK_SECONDS if seen.since and seen.since == last else 0.0
            last = seen.since
        text = f"the engine process {self._process.pid} hangs in a step: no result for {limit:.0f} s (--step-timeout)"
        return Death(self._named(EngineDead(text)), "step_timeout")

    def _last_words_seconds(self) -> float:
        """For what the engine said before it died to arrive: after a signal it had no time to say anything."""
        code = self._process.returncode
        return 0.5 if code is None or code >= 0 else 0.05

    def _last_words(self) -> Death | None:
        assert self._running is not None
        error = self._running.exception() if self._running.done() else None
        if error is None:
            return None
        if not isinstance(error, ServeError):
            logger.error("the engine's messages could not be handled", exc_info=error)
            error = EngineError(f"the engine's messages could not be handled: {type(error).__name__}: {error}")
        return Death(self._named(error), "rank" if isinstance(error, RankFailed) else "failed")

    def _named(self, error: ServeError) -> ServeError:
        """Which of several engines it comes from."""
        return type(error)(f"engine {self._index}: {error}") if self._options.data_parallel_size > 1 else error

    def _death(self, phase: str) -> Death:
        code = self._process.returncode
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        text = f"the engine process {self._process.pid} died {phase} by {how}; {HINTS.get(how, ASK_LOG)}"
        error = EngineDead(text)
        return Death(self._named(error), "exited" if code is None or code >= 0 else "killed")

    async def stop(self, patience: float = STOP_SECONDS) -> None:
        """End the engine process: ask, then kill; one that is still starting has nothing to lose. Idempotent."""
        if not self._ended.done() and self.client.ready:
            self.client.shut_down()
            await asyncio.wait([self._ended], timeout=patience)
            if not self._ended.done():
                logger.warning("engine process %d did not stop within %g s: killed", self._process.pid, patience)
        if not self._ended.done():
            self._kill()
        await asyncio.wait([self._ended])  # not the future itself, which would be cancelled with this
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._running
        self.client.fail(EngineDead("the engine was stopped"))
        self.client.close()
