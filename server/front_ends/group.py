"""The front end processes of a server, on its host and on those that have joined.

The processes of a host accept connections from one listening socket, which stays open in the process that starts them:
connections wait in its queue while a front end is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from serve_llm.common.errors import ServeError
from serve_llm.common.options.schema import Options
from serve_llm.server.adapters.registry import AdapterRegistry
from serve_llm.server.admission.controller import AdmissionController
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.front_ends.host import FrontEndHost, LocalHost
from serve_llm.server.front_ends.messages import (
    AbortRequests,
    Adapters,
    AdaptersKnown,
    Close,
    CollectCounts,
    Counts,
    Drain,
    EngineState,
    FromFrontEnd,
    Loaded,
    Open,
    Setup,
    ToFrontEnd,
    encode,
)
from serve_llm.server.front_ends.process import FrontEndProcess
from serve_llm.server.front_ends.relay import Relay
from serve_llm.server.generate.dispatcher import LocalDispatcher
from serve_llm.server.metrics.meter import FrontEndCounts, ServerCounts

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.25  # interval between checks of the engines' state
HUNG_POLLS = 80  # consecutive polls without a message after which a front end counts as hung
HUNG_LOADING_POLLS = 960
COLLECT_SECONDS = 1.0  # time for front ends to answer a scrape
ADAPTER_SECONDS = 5.0  # time for front ends to learn about an adapter
STOP_SECONDS = 5.0  # time for front ends to end when asked, before they are killed


class _Server(NamedTuple):
    """Data that every front end needs."""

    directory: str  # the checkpoint on this host
    replicas: Replicas
    admission: AdmissionController
    adapters: AdapterRegistry
    counts: ServerCounts
    start_time: int  # Unix seconds


class FrontEndGroup:
    """Create it in the event loop: the processes start immediately, so that their imports overlap those of the engines.
    Call `connect` before `start`."""

    def __init__(self, options: Options, listener: socket.socket) -> None:
        """listener: where the front ends on this host accept connections. With one front end, there are no processes
        here: the server process answers clients itself."""
        self.counts = FrontEndCounts(0)
        self._options = options
        self._folder = tempfile.mkdtemp(prefix="serve-llm-")  # mode 700: only this user can connect
        self.server_socket = f"{self._folder}/server"
        self._answers_itself = options.front_ends == 1
        self._local = LocalHost(0 if self._answers_itself else options.front_ends, self.server_socket, listener)
        self._hosts: list[FrontEndHost] = [self._local]
        self._server: _Server | None = None
        self._is_serving = False
        self._upgrade_is_due = False  # asked for before `serve`
        self._revision = 0  # counts upgrades
        self._num_started = 0
        self._num_collections = 0
        self._adapters_version = 0
        self._state = b""  # the last state sent
        self._changed = asyncio.Event()  # a process has ended, or sent an awaited message
        self._keeping: set[asyncio.Task[None]] = set()
        for _ in range(self._local.num_wanted):
            self._launch(self._local)

    @property
    def processes(self) -> list[tuple[FrontEndHost, FrontEndProcess]]:
        """All processes, each with its host."""
        return [(host, process) for host in self._hosts for process in host.processes]

    def connect(
        self,
        directory: str,
        replicas: Replicas,
        admission: AdmissionController,
        adapters: AdapterRegistry,
        counts: ServerCounts,
        start_time: int,
    ) -> None:
        """Called when the engines are ready. counts: the server's, to which those of front ends are added."""
        self._server = _Server(directory, replicas, admission, adapters, counts, start_time)
        for host, process in self.processes:
            self._set_up(host, process)

    async def load(self) -> None:
        """Wait until the front ends on this host are loaded. Raises ServeError if one of them fails."""
        await self._wait_for(lambda: self._local.has_failed or self._local.is_loaded)
        if self._local.has_failed:
            raise ServeError("a front end ended while it was loading; the log says why")

    def add_host(self, host: FrontEndHost) -> None:
        """Add a host that has joined. Its front ends start loading immediately."""
        self._hosts.append(host)
        for _ in range(host.num_wanted):
            self._launch(host)

    def remove_host(self, host: FrontEndHost) -> None:
        """Remove a host that is lost or has left. Its processes have ended."""
        host.num_wanted = 0
        self._hosts.remove(host)

    async def serve(self) -> None:
        """Accept connections, and replace front ends that end, until cancelled."""
        self._is_serving = True
        if self._upgrade_is_due:
            self._upgrade_is_due = False
            self.upgrade()
        while True:
            self.advance()
            self._send_state()
            self._kill_hung()
            await asyncio.sleep(POLL_SECONDS)

    def upgrade(self) -> None:
        """Replace all front ends, one after the other, by new processes, which run the currently installed code. If
        they do not serve yet, this waits until they do."""
        if not self._is_serving:
            self._upgrade_is_due = True
            return
        logger.info("Replacing %d front ends one after the other", sum(host.num_wanted for host in self._hosts))
        self._revision += 1
        for host in self._hosts:
            host.upgrade()
        self.advance()

    async def stop(self) -> None:
        """End all front ends, and kill those left after STOP_SECONDS. Idempotent."""
        self._is_serving = False
        for _, process in self.processes:
            if process.phase in ("loading", "spare"):
                process.kill()
            else:
                process.send(Drain(0.0))
        await self._wait_for(lambda: not self.processes, STOP_SECONDS)
        for _, process in self.processes:
            process.kill()
        await asyncio.gather(*self._keeping)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def collect_counts(self) -> None:
        """Add what the front ends have counted so far to the server's counts."""
        self._num_collections += 1
        number = self._num_collections
        asked = self._send_to(CollectCounts(number), "serving", "draining")

        def have_answered() -> bool:
            return all(one.counted >= number for one in asked if not one.has_ended)

        await self._wait_for(have_answered, COLLECT_SECONDS)

    async def share_adapters(self) -> None:
        """Returns when all front ends know the current adapters."""
        assert self._server is not None
        self._adapters_version += 1
        version = self._adapters_version
        message = Adapters(version, self._server.adapters.adapters)
        asked = self._send_to(message, "loading", "spare", "serving", "draining")

        def all_know() -> bool:
            return all(one.adapters_version >= version for one in asked if not one.has_ended)

        await self._wait_for(all_know, ADAPTER_SECONDS)

    # Processes

    def _launch(self, host: FrontEndHost) -> None:
        self._num_started += 1
        process = host.launch(self._num_started, self._revision)
        host.processes.append(process)
        task = asyncio.create_task(self._keep(host, process))
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    async def _keep(self, host: FrontEndHost, process: FrontEndProcess) -> None:
        """Serve one process until it has ended."""
        try:
            await process.connect(lambda message: self._receive(host, process, message))
            if self._server is not None:
                self._set_up(host, process)
            how = await process.wait()
        except Exception:
            logger.exception("An error in the server ends the front end process %d", process.pid)
            process.abandon()
            how = "a kill"
        process.has_ended = True
        host.processes.remove(process)
        if process.relay is not None:
            process.relay.close()
        if host.num_wanted and (process.phase == "serving" or process.revision == self._revision):
            self._note_end(host, process, how)
        self._changed.set()
        self.advance()

    def _note_end(self, host: FrontEndHost, process: FrontEndProcess, how: str) -> None:
        """Log and count the end of a process, unless it was draining or in reserve."""
        if process.phase == "loading":
            host.note_failure()
        if not self._is_serving or process.phase not in ("serving", "loading"):
            return
        name = f"{process.pid}" if host.name is None else f"{process.pid} on {host.name}"
        if process.phase == "serving":
            self.counts.num_restarts += 1
            logger.error("The front end process %s ended by %s; another one takes its place", name, how)
        else:
            logger.error("The front end process %s ended by %s while it was loading", name, how)

    def _set_up(self, host: FrontEndHost, process: FrontEndProcess) -> None:
        """Tell a connected process what it must load. Does nothing if it has been told."""
        server = self._server
        if server is None or process.relay is not None or process.channel is None:
            return
        num_engines = len(server.replicas.engines)
        process.relay = Relay(LocalDispatcher(server.replicas, server.admission), num_engines, process.send)
        process.send(
            Setup(
                host.adapt(self._options),
                host.find_directory(server.directory),
                server.replicas.model_info,
                num_engines,
                process.number,
                host.server_socket,
                server.start_time,
                time.perf_counter() if host.has_own_clock else None,
            )
        )
        process.send(Adapters(self._adapters_version, server.adapters.adapters))
        process.send(self._read_state(server))

    def advance(self) -> None:
        """Start, activate or drain processes to reach the wanted number on each host."""
        if not self._is_serving:
            return
        for host in self._hosts:
            for _ in range(host.advance(self._revision, self._options.drain_timeout)):
                self._launch(host)
        self.counts.num_serving = sum(host.num_serving for host in self._hosts) + self._answers_itself

    def _kill_hung(self) -> None:
        for _, process in self.processes:
            process.num_silent_polls += 1
            limit = HUNG_LOADING_POLLS if process.phase == "loading" else HUNG_POLLS
            if process.num_silent_polls == limit:
                seconds = limit * POLL_SECONDS
                logger.error("The front end process %d hangs: no sign of life for %.0f s", process.pid, seconds)
                process.kill()

    # Messages

    def _receive(self, host: FrontEndHost, process: FrontEndProcess, message: FromFrontEnd) -> None:
        process.num_silent_polls = 0
        relay = process.relay
        assert relay is not None, "a front end sends nothing before Setup"
        if isinstance(message, Open):
            relay.open(message)
        elif isinstance(message, AbortRequests):
            relay.abort(message)
        elif isinstance(message, Close):
            relay.close_generation(message)
        elif isinstance(message, Counts):
            self._add_counts(message)
            process.counted = max(process.counted, message.number)
            self._changed.set()
        elif isinstance(message, AdaptersKnown):
            process.adapters_version = message.version
            self._changed.set()
        elif isinstance(message, Loaded):
            process.phase = "spare"
            host.note_loaded()
            self._changed.set()
            self.advance()

    def _add_counts(self, message: Counts) -> None:
        assert self._server is not None
        for engine, counts in zip(self._server.replicas.engines, message.meters, strict=True):
            engine.meter.add(counts)
        totals = self._server.counts
        totals.refused.update(message.refused)
        totals.ignored_fields.update(message.ignored_fields)
        totals.http.add(message.http)

    def _send_to(self, message: ToFrontEnd, *phases: str) -> list[FrontEndProcess]:
        """Send to the processes in these phases that have been set up. Returns them."""
        receivers = [one for _, one in self.processes if one.phase in phases and one.relay is not None]
        for process in receivers:
            process.send(message)
        return receivers

    def _send_state(self) -> None:
        """Tell the front ends what has changed about the engines."""
        assert self._server is not None
        state = self._read_state(self._server)
        encoded = encode(state)
        if encoded != self._state:
            self._state = encoded
            self._send_to(state, "loading", "spare", "serving", "draining")

    def _read_state(self, server: _Server) -> EngineState:
        return EngineState(server.admission.obstacle, server.replicas.outage, server.admission.pace)

    async def _wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until the condition is true, for at most this long."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
