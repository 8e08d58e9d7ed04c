"""The HTTP server: uvicorn with limits on slow and hostile connections.

`Connection` uses private parts of uvicorn's `HttpToolsProtocol` and `RequestResponseCycle` (`_start_asgi_task`,
`pipeline`, `flow`, `_unset_keepalive_if_required`, `cycle.transport`, `cycle.message_event`), so pyproject.toml pins
uvicorn to the tested version.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from serve_llm.common.errors import OptionError
from serve_llm.common.options.limits import Limits
from serve_llm.server.http.body_writer import BODY_WRITER, BodyWriter
from serve_llm.server.http.certificate import CertificateFiles, load_certificate
from serve_llm.server.http.errors import (
    HeaderTooLarge,
    InvalidRequest,
    RequestError,
    RequestStalled,
    Unavailable,
    answer_for,
    error_body,
    send_error,
)
from serve_llm.server.http.file_reserve import FileReserve
from serve_llm.server.http.parser import RequestParser

logger = logging.getLogger(__name__)

SECTION_BYTES = 2**20  # a client may take `stall_seconds` per section of a body, which limits the total time
POLL_SECONDS = 0.05  # between two checks for open connections
TICK_SECONDS = 1.0  # between two updates of the date header, and two looks at the certificate
KEEP_ALIVE_SECONDS = 75.0
"""How long a connection may be idle between two requests. Clients and load balancers often keep connections for 60 s; a
request that crosses the server's closing is lost."""
DRAIN_IDLE_SECONDS = 5.0  # the same while draining
LINGER_SECONDS = 5.0  # time for a client to read why its request was refused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass
class DrainState:
    """Whether a server is draining: each of its further responses closes the connection."""

    has_begun: bool = False


class Connection(HttpToolsProtocol):
    """One connection. Closes it when the header is too long, when the client neither sends nor reads for
    `stall_seconds`, and when the client keeps sending after its response. Invalid HTTP gets the usual JSON error.
    """

    def __init__(self, limits: Limits, drain: DrainState, files: FileReserve, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = RequestParser(self)
        self._limits = limits
        self._drain = drain
        self._files = files
        self._is_receiving = False  # a request has begun but is incomplete
        self._header_bytes: int | None = 0  # bytes received of an incomplete header; None after the header
        self._section_bytes = 0  # bytes of the current section of the body, of trailers, or of dropped data
        self._running: RequestResponseCycle | None = None  # the active cycle; pipelined ones wait behind it
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_lingering = False  # the last response is sent; further input is dropped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_read_timer()
        verdict = self._files.judge(transport)
        if verdict == "refuse":
            self._refuse(Unavailable("the server has too many open connections"))
        elif verdict == "drop":
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._read_timer)
        _cancel(self._write_timer)
        self._unset_keepalive_if_required()
        self._disconnect()
        super().connection_lost(exc)
        # The last request refers to its connection. Cycles would fill the heap until a full collection, during which
        # all streams wait.
        if self._running is not None:
            _drop_writer(self._running)
        self._running = None
        self.cycle = None  # type: ignore[assignment]
        self.scope = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if self._header_bytes is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes is not None and self._header_bytes > self._limits.header_bytes:
            self._refuse(self._header_error)
        elif self._read_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._start_read_timer()  # empty lines do not begin a request

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_receiving = True
        self._start_read_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._header_bytes is not None:
            super().on_header(name, value.rstrip(b" \t"))  # the parser removes only spaces before the value
            return
        self._section_bytes += len(name) + len(value) + 4  # a trailer, which is dropped
        if self._section_bytes > self._limits.header_bytes:
            self._refuse(self._header_error)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._header_bytes = None
        app = self.app
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self._limits.header_bytes:
            self.app = self._refuse_header
            self.url = self.url[:1000]  # uvicorn's parser takes no more than 64 KiB
        super().on_headers_complete()
        self.app = app
        self.cycle.transport = _CycleTransport(self)  # type: ignore[assignment]
        self.scope[BODY_WRITER] = BodyWriter(self.cycle)  # type: ignore[literal-required]
        if self._drain.has_begun:
            self.cycle.keep_alive = False
        if self.cycle is not self._running:
            self._stop_read_timer()  # do not read a pipelined request before its turn

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._section_bytes += len(body)
        if self.cycle.response_complete:
            if self._section_bytes > self._limits.body_bytes:
                self.linger()
        elif self.cycle is self._running and self._section_bytes > SECTION_BYTES:
            self._start_read_timer()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_receiving = False
        self._header_bytes = 0
        self._stop_read_timer()

    def on_response_complete(self) -> None:
        self._section_bytes = 0
        if self._running is not None:
            _drop_writer(self._running)
        super().on_response_complete()
        if self._drain.has_begun:
            self.shorten_keep_alive()

    def shorten_keep_alive(self) -> None:
        """Close the connection after its response, or soon if no request comes."""
        if self._running is not None and not self._running.response_started:
            self._running.keep_alive = False
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = self.loop.call_later(DRAIN_IDLE_SECONDS, self.timeout_keep_alive_handler)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            app = functools.partial(_run_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)
        self._running = cycle
        if cycle.more_body:
            self._start_read_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.stall_seconds, self._give_up, "did not read its answer")

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._write_timer)

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest("the request is not valid HTTP/1.1"))

    def linger(self) -> None:
        """Close after the client has had time to read the response. Closing immediately, with unread input, would reset
        the connection and lose the response. Idempotent."""
        if self._is_lingering or self.transport.is_closing():
            return
        self._is_lingering = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _start_read_timer(self) -> None:
        self._section_bytes = 0
        self._stop_read_timer()
        self._read_timer = self.loop.call_later(self._limits.stall_seconds, self._on_read_timeout)

    def _stop_read_timer(self) -> None:
        _cancel(self._read_timer)
        self._read_timer = None

    def _on_read_timeout(self) -> None:
        if not self._is_receiving or (self._header_bytes is None and self.cycle.response_complete):
            self._give_up("sent no request")
        else:
            self._refuse(
                RequestStalled(f"the rest of the request did not arrive within {self._limits.stall_seconds:g} s")
            )

    def _give_up(self, action: str) -> None:
        level = logging.DEBUG if self.cycle is None else logging.WARNING  # browsers open unused connections
        seconds = self._limits.stall_seconds
        logger.log(level, "Closed the connection of %s: for %g s the client %s", self.client, seconds, action)
        self.transport.abort()  # drops unsent data; the request ends as if the client had disconnected

    def _refuse(self, error: RequestError) -> None:
        """Send an error in place of the app, and close."""
        if self._is_lingering or self.transport.is_closing():
            return
        logger.debug("Refused the request of %s: %s", self.client, error)
        if self._running is not None and self._running.response_started and not self._running.response_complete:
            self.transport.abort()  # another response is being sent
            return
        self._disconnect()
        answer = answer_for(error)
        body = error_body(error)
        head = f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.linger()

    def _disconnect(self) -> None:
        """Tell the app that the client disconnected. (The base class tells only the newest of several requests.)"""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()

    @property
    def _header_error(self) -> HeaderTooLarge:
        return HeaderTooLarge(f"request line and headers are longer than {self._limits.header_bytes} bytes")

    async def _refuse_header(self, scope: Message, receive: Receive, send: Send) -> None:
        await send_error(self._header_error, send)


async def _run_without_chunks(
    app: AsgiApp, cycle: RequestResponseCycle, scope: Message, receive: Receive, send: Send
) -> None:
    """Respond to an HTTP/1.0 client, which does not support chunks: a body of unknown length ends with the
    connection."""
    has_length = False

    async def send_without_chunks(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_without_chunks)


class _CycleTransport:
    """One request's view of a `Connection`'s transport, whose `close` first reads remaining input."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """Called after a response."""
        connection = self._connection
        if connection.cycle is not None and connection.cycle.more_body:  # None: the connection is lost
            connection.linger()
        else:
            connection.transport.close()


def _drop_writer(cycle: RequestResponseCycle) -> None:
    """Remove from the request's scope what refers to its cycle, which holds the scope."""
    cycle.scope.pop(BODY_WRITER, None)  # type: ignore[misc]


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _check_readable(files: Mapping[str, str | None]) -> None:
    """files: option -> path. Raises OptionError; the ssl module would not name the file."""
    for option, path in files.items():
        try:
            if path is not None:
                open(path, "rb").close()
        except OSError as error:
            raise OptionError(f"{option} {path}: {error.strerror}; give a PEM file that this user may read") from None


class HttpServer(uvicorn.Server):
    """Serves until `should_exit`, then closes open connections within `timeout_graceful_shutdown` seconds."""

    def __init__(self, app: AsgiApp, limits: Limits, ssl_keyfile: str | None, ssl_certfile: str | None) -> None:
        """Raises OptionError if key and certificate cannot be used."""
        self._drain = DrainState()
        self._must_exit = False
        self._exit_asked = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # set while it serves
        config = uvicorn.Config(
            app,
            http=functools.partial(Connection, limits, self._drain, FileReserve()),  # type: ignore[arg-type]
            ssl_keyfile=ssl_keyfile,
            ssl_certfile=ssl_certfile,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,  # type: ignore[arg-type]
            timeout_graceful_shutdown=1,
        )
        _check_readable({"--ssl-keyfile": ssl_keyfile, "--ssl-certfile": ssl_certfile})
        try:
            if ssl_keyfile is not None and ssl_certfile is not None:
                load_certificate(ssl_keyfile, ssl_certfile)
            config.load()
        except (ssl.SSLError, ValueError) as error:
            raise OptionError(
                f"--ssl-keyfile {ssl_keyfile}, --ssl-certfile {ssl_certfile}: {error}; both must be PEM files, and the "
                "certificate made for the key"
            ) from None
        super().__init__(config)
        self._certificate: CertificateFiles | None = None
        if config.ssl is not None and ssl_keyfile is not None and ssl_certfile is not None:
            self._certificate = CertificateFiles(config.ssl, ssl_keyfile, ssl_certfile)
        # The daemon logs start and stop itself; uvicorn warns for every bad client.
        logging.getLogger("uvicorn").setLevel(logging.ERROR)

    @property
    def should_exit(self) -> bool:
        """May be set in any thread."""
        return self._must_exit

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        self._must_exit = value
        if value and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._exit_asked.set)

    async def main_loop(self) -> None:
        """Like the base class, which wakes ten times a second to look at `should_exit`."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            if self._certificate is not None:
                self._certificate.reload_if_changed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._exit_asked.wait()

    def stop_accepting(self) -> None:
        """Accept no more connections, and close each one after its next response. An idle connection stays open until
        the client closes it or for a few more seconds, because closing it could lose a request in transit."""
        self._drain.has_begun = True
        for server in self.servers:
            server.close()
        for connection in self.server_state.connections:
            if isinstance(connection, Connection):
                connection.shorten_keep_alive()

    async def wait_until_idle(self, seconds: float) -> None:
        """Wait at most this long until no connection is open."""
        deadline = time.monotonic() + seconds
        while self.server_state.connections and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the daemon handles signals
