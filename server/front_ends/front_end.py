"""The front end process: load the tokenizer and the app, answer clients, drain, and count."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve_llm.common.logs import configure
from serve_llm.server.adapters.registry import AdapterRegistry
from serve_llm.server.app import BuiltFrontEndApp, create_front_end_app
from serve_llm.server.front_ends.channel import MessageChannel
from serve_llm.server.front_ends.dispatcher import RemoteDispatcher
from serve_llm.server.front_ends.forwarder import Forwarder, list_forwarded_paths
from serve_llm.server.front_ends.messages import (
    Adapters,
    AdaptersKnown,
    CollectCounts,
    Counts,
    Drain,
    EngineState,
    FromFrontEnd,
    Loaded,
    Rejected,
    RelayedOutputs,
    Replays,
    Setup,
    decode_to_front_end,
    encode,
)
from serve_llm.server.garbage import limit_collections
from serve_llm.server.http.connection import HttpServer
from serve_llm.server.http.paths import PathMiddleware
from serve_llm.server.metrics.meter import Clock
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.tracing.start import EXPORT_SECONDS, start_tracing

if TYPE_CHECKING:
    from serve_llm.server.tracing.tracing import Tracing  # imports an optional dependency

COUNT_SECONDS = 1.0  # interval between messages with counts
END_SECONDS = 0.5  # time for ended requests to get their last event


class FrontEnd:
    """Connect `channel` before `run`."""

    def __init__(self, listener: socket.socket) -> None:
        self.server_socket: str | None = None  # path, once the server process has sent it
        self.channel = MessageChannel(self._receive)
        self._listener = listener
        self._dispatcher: RemoteDispatcher | None = None
        self._adapters: AdapterRegistry | None = None
        self._app: BuiltFrontEndApp | None = None
        self._tracing: Tracing | None = None
        self._http_server: HttpServer | None = None
        self._serving: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> bool:
        """Returns when the front end has drained (False), or the server process is gone (True). Raises ServeError if
        loading fails."""
        awaited: list[asyncio.Future[Any]] = [asyncio.ensure_future(self.channel.closed.wait()), self._ended]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            task.cancel()
        if self._app is not None:
            self._send_counts(0)
            self._app.prompts.close()
        if self._tracing is not None:
            await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(self._tracing.stop))], timeout=EXPORT_SECONDS)
        self.channel.close()
        if self._ended.done():
            self._ended.result()
        return not self._ended.done()

    def _send(self, message: FromFrontEnd) -> None:
        self.channel.send(encode(message))

    def _receive(self, content: bytes) -> None:
        message = decode_to_front_end(content)
        if isinstance(message, Setup):
            self._set_up(message)
            return
        if isinstance(message, Drain):
            self._start(self._drain(message))
            return
        dispatcher = self._dispatcher
        assert dispatcher is not None, "Setup comes first"
        if isinstance(message, RelayedOutputs):
            dispatcher.deliver(message)
        elif isinstance(message, Replays):
            dispatcher.note_replays(message)
        elif isinstance(message, Rejected):
            dispatcher.reject(message)
        elif isinstance(message, EngineState):
            dispatcher.update(message)
        elif isinstance(message, Adapters):
            self._replace_adapters(message)
        elif isinstance(message, CollectCounts):
            self._send_counts(message.number)
        else:
            self._start_serving()

    def _set_up(self, setup: Setup) -> None:
        self.server_socket = setup.server_socket
        configure(setup.options.log_level, f"front end {setup.number}", setup.options.log_format)
        clock = Clock() if setup.clock_time is None else Clock.running_from(setup.clock_time)
        self._dispatcher = RemoteDispatcher(setup.model_info, setup.num_engines, setup.number, self._send, clock)
        self._adapters = AdapterRegistry(setup.model_info, setup.options.max_lora_rank, setup.options.served_model_name)
        self._start(self._load(setup))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine in the background. An exception in it ends the front end."""

        def end(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None and not self._ended.done():
                self._ended.set_exception(task.exception() or AssertionError)

        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(end)
        self._tasks.append(task)

    async def _load(self, setup: Setup) -> None:
        assert self._dispatcher is not None and self._adapters is not None
        options = setup.options
        model = await asyncio.to_thread(ServedModel.load, Path(setup.directory), options)
        tracing = start_tracing(options.otlp_traces_endpoint)
        if options.seed is not None:  # other front ends draw other seeds
            options = replace(options, seed=(options.seed + setup.number) % 2**64)
        refused = self._dispatcher.refused
        app = create_front_end_app(self._dispatcher, model, options, self._adapters, refused, tracing, setup.start_time)
        forwarder = Forwarder(app.app, list_forwarded_paths(options), setup.server_socket)
        self._http_server = HttpServer(
            PathMiddleware(forwarder), options.limits, options.ssl_keyfile, options.ssl_certfile
        )
        self._app = app
        self._tracing = tracing
        app.prompts.start_first_worker()
        limit_collections()
        self._send(Loaded())
        self._start(self._count())

    def _replace_adapters(self, message: Adapters) -> None:
        assert self._adapters is not None
        self._adapters.adapters.clear()
        self._adapters.adapters.update(message.adapters)
        self._send(AdaptersKnown(message.version))

    # Serving

    def _start_serving(self) -> None:
        assert self._http_server is not None, "only a front end that is loaded is activated"
        self._serving = asyncio.ensure_future(self._http_server.serve(sockets=[self._listener]))

    async def _drain(self, message: Drain) -> None:
        """Let open connections finish, then end the front end."""
        if self._dispatcher is not None and self._http_server is not None and self._serving is not None:
            self._http_server.stop_accepting()
            await self._http_server.wait_until_idle(message.seconds)
            if self._dispatcher.num_open:
                self._dispatcher.end_open()
                await self._http_server.wait_until_idle(END_SECONDS)
            self._http_server.should_exit = True
            await self._serving
        if not self._ended.done():
            self._ended.set_result(None)

    # Counts

    async def _count(self) -> None:
        while True:
            self._send_counts(0)
            await asyncio.sleep(COUNT_SECONDS)

    def _send_counts(self, number: int) -> None:
        """number: of the message that this answers, 0 if none."""
        dispatcher = self._dispatcher
        if dispatcher is None or self._app is None:
            return
        counts = self._app.counts
        self._send(
            Counts(
                number,
                [meter.take() for meter in dispatcher.meters],
                _take(counts.refused),
                _take(counts.ignored_fields),
                counts.http.take(),
            )
        )


def _take(counts: Counter[str]) -> dict[str, int]:
    """Return all counts and reset them."""
    taken = {label: count for label, count in counts.items() if count}
    counts.clear()
    return taken
