"""Engine processes: start, connect, watch and stop them. Used by the daemon and by the offline `LLM` alike."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from serve_llm.engine.client import EngineClient
from serve_llm.engine.errors import EngineDead, EngineError, ServeError
from serve_llm.engine.options import Options
from serve_llm.server.replicas import Replicas

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0  # for an engine that was asked to end, before it is killed


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


class Supervisor:
    """All engine processes. Make it inside the event loop that uses them."""

    def __init__(self, options: Options, directory: str) -> None:
        """`directory`: the local checkpoint. They start at once, so that their imports overlap the caller's."""
        self._options = options
        self._engines = [EngineProcess(options, directory, index) for index in range(options.data_parallel_size)]
        self._replicas: Replicas | None = None

    @property
    def replicas(self) -> Replicas:
        """The engines as one, once `start` has returned."""
        assert self._replicas is not None, "start() comes first"
        return self._replicas

    async def start(self) -> None:
        """Wait until all engines are ready. Raises the ServeError that the first one failed with, or EngineDead."""
        starting = [asyncio.ensure_future(engine.start()) for engine in self._engines]
        try:
            await asyncio.gather(*starting)
        finally:
            for future in starting:
                future.cancel()
        clients = [engine.client for engine in self._engines]
        self._replicas = Replicas(clients, prefix_caching=self._options.enable_prefix_caching)

    async def watch(self) -> ServeError:
        """Returns the first cause when an engine is gone; every open request of every engine has ended with it then."""
        watching = [asyncio.ensure_future(engine.watch()) for engine in self._engines]
        try:
            await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            failure = next(future.result() for future in watching if future.done())
        finally:
            for future in watching:
                future.cancel()
        for engine in self._engines:
            engine.client.fail(failure)
        return failure

    async def stop(self) -> None:
        """End all engine processes. Idempotent."""
        await asyncio.gather(*(engine.stop() for engine in self._engines))


class EngineProcess:
    """One engine process and the client that talks to it."""

    def __init__(self, options: Options, directory: str, index: int) -> None:
        self._options = options
        self._directory = directory
        self._index = index
        self.client = EngineClient()
        self._process = launch(self.client.address)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Not a pool's thread: the interpreter would wait for it at exit, and so for ever for an engine nobody stopped.
        threading.Thread(target=self._await_end, args=(asyncio.get_running_loop(),), daemon=True).start()
        self._running: asyncio.Future[None] | None = None

    def _await_end(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(self._ended.set_result, None)

    async def start(self) -> None:
        """Wait until the engine is ready. Raises the ServeError that it failed with, or EngineDead."""
        starting = asyncio.ensure_future(self.client.start(self._options, self._directory, self._index))
        try:
            await asyncio.wait([starting, self._ended], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():  # it died; a last message may still be on its way
                await asyncio.wait([starting], timeout=0.5)
        finally:
            answered = starting.done()
            starting.cancel()
        if not answered:
            raise self._death("while starting")
        try:
            starting.result()
        except ServeError as error:
            raise self._named(error) from None
        self._running = asyncio.ensure_future(self.client.run())

    async def watch(self) -> ServeError:
        """Returns the first cause when the engine is gone; every open request has ended with it by then."""
        assert self._running is not None, "start() comes first"
        await asyncio.wait([self._running, self._ended], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([self._running], timeout=0.5)  # it may have said why before it died
        error = self._running.exception() if self._running.done() else None
        if error is not None and not isinstance(error, ServeError):
            logger.error("the engine's messages could not be handled", exc_info=error)
            error = EngineError(f"the engine's messages could not be handled: {type(error).__name__}: {error}")
        failure = self._named(error) if error is not None else self._death("while serving")
        self.client.fail(failure)
        return failure

    def _named(self, error: ServeError) -> ServeError:
        """Which of several engines it comes from."""
        return type(error)(f"engine {self._index}: {error}") if self._options.data_parallel_size > 1 else error

    def _death(self, phase: str) -> ServeError:
        code = self._process.poll()
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        hint = "; the system may be out of memory" if code == -signal.SIGKILL else ""
        return self._named(EngineDead(f"the engine process {self._process.pid} died {phase} by {how}{hint}"))

    async def stop(self) -> None:
        """End the engine process: ask, then kill; one that is still starting has nothing to lose. Idempotent."""
        if not self._ended.done() and self.client.ready:
            self.client.shut_down()
            await asyncio.wait([self._ended], timeout=STOP_SECONDS)
            if not self._ended.done():
                logger.warning("engine process %d did not stop within %.0f s: killed", self._process.pid, STOP_SECONDS)
        if not self._ended.done():
            self._process.kill()
        await asyncio.wait([self._ended])  # not the future itself, which would be cancelled with this
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServeError):
                await self._running
        self.client.fail(EngineDead("the engine was stopped"))
        self.client.close()
