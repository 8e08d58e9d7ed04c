"""The HTTP listener: uvicorn without its signal handling, and what answers before the app is there."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import logging
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from serve_llm.engine.errors import OptionError
from serve_llm.engine.limits import Limits
from serve_llm.server.errors import (
    HeaderTooLarge,
    InvalidRequest,
    RequestError,
    RequestStalled,
    Unavailable,
    answer_for,
    error_body,
    send_error,
)

logger = logging.getLogger(__name__)

SECTION_BYTES = 2**20  # of a body, that `stall_seconds` are for: a slower client does not hold its memory for hours
LINGER_SECONDS = 5.0  # for a client to read why its request was cut short

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class Doorway:
    """An ASGI app that passes to `app` once it is set. Until then /health is fine and everything else has to wait."""

    def __init__(self) -> None:
        self.app: AsgiApp | None = None

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/health":
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"status":"ok"}'})
        elif scope["type"] == "http":
            await send_error(Unavailable("the server is starting"), send)


class Connection(HttpToolsProtocol):
    """One connection, which neither a long header, nor a client that stands still, nor one that sends on after its
    answer can keep. What is not HTTP is answered in the shape of all errors."""

    def __init__(self, limits: Limits, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._limits = limits
        self._has_begun = False  # a request that is not complete
        self._header_bytes: int | None = 0  # received of a header that is not complete; None: it is
        self._section_bytes = 0  # of the body since `_await_more`, of the trailers, or of what is dropped
        self._running: RequestResponseCycle | None = None  # the one that answers; others wait behind it
        self._reading: asyncio.TimerHandle | None = None  # ends the connection if nothing comes
        self._writing: asyncio.TimerHandle | None = None  # or nothing goes
        self._lingers = False  # answered for good: what still comes is dropped

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_more()

    def connection_lost(self, exc: Exception | None) -> None:
        _cancel(self._reading)
        _cancel(self._writing)
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            return
        if self._header_bytes is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes is not None and self._header_bytes > self._limits.header_bytes:
            self._refuse(self._too_large)
        elif self._reading is None and (self.cycle is None or self.cycle.response_complete):
            self._await_more()  # empty lines, which begin no request

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._await_more()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._header_bytes is not None:
            super().on_header(name, value)
            return
        self._section_bytes += len(name) + len(value) + 4  # a trailer, which nobody reads
        if self._section_bytes > self._limits.header_bytes:
            self._refuse(self._too_large)

    def on_headers_complete(self) -> None:
        self._header_bytes = None
        app = self.app
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self._limits.header_bytes:
            self.app = self._header_too_large
        super().on_headers_complete()
        self.app = app
        self.cycle.transport = _Outlet(self)  # type: ignore[assignment]
        if self.cycle is not self._running:
            self._await_nothing()  # it is not read until it has its turn

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._section_bytes += len(body)
        if self.cycle.response_complete:
            if self._section_bytes > self._limits.body_bytes:
                self.linger()
        elif self.cycle is self._running and self._section_bytes > SECTION_BYTES:
            self._await_more()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._has_begun, self._header_bytes = False, 0
        self._await_nothing()

    def on_response_complete(self) -> None:
        self._section_bytes = 0
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        super()._start_asgi_task(cycle, app)
        self._running = cycle
        if cycle.more_body:
            self._await_more()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self._limits.stall_seconds, self._give_up, "did not read its answer")

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._writing)

    def send_400_response(self, msg: str) -> None:
        self._refuse(InvalidRequest("the request is not valid HTTP/1.1"))

    def linger(self) -> None:
        """Close, once the client has had time to read the answer: closing at once, with bytes of its own on their
        way, would take the answer from it. Idempotent."""
        if self._lingers or self.transport.is_closing():
            return
        self._lingers = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._await_nothing()
        self._reading = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _await_more(self) -> None:
        self._section_bytes = 0
        self._await_nothing()
        self._reading = self.loop.call_later(self._limits.stall_seconds, self._stalled)

    def _await_nothing(self) -> None:
        _cancel(self._reading)
        self._reading = None

    def _stalled(self) -> None:
        if not self._has_begun or (self._header_bytes is None and self.cycle.response_complete):
            self._give_up("sent no request")
        else:
            self._refuse(
                RequestStalled(f"the rest of the request did not come within {self._limits.stall_seconds:g} s")
            )

    def _give_up(self, what: str) -> None:
        level = logging.DEBUG if self.cycle is None else logging.WARNING  # browsers connect early
        seconds = self._limits.stall_seconds
        logger.log(level, "Closed the connection of %s: for %g s the client %s", self.client, seconds, what)
        self.transport.abort()  # drops what waits to be written; the request ends as if the client had left

    def _refuse(self, error: RequestError) -> None:
        """Answer in the app's place, and close."""
        if self._lingers or self.transport.is_closing():
            return
        logger.debug("Refused the request of %s: %s", self.client, error)
        if self._running is not None and self._running.response_started and not self._running.response_complete:
            self.transport.abort()  # in the middle of another answer
            return
        self._disconnect()
        answer, body = answer_for(error), error_body(error)
        head = f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.linger()

    def _disconnect(self) -> None:
        """For the app the client has left. (The base class tells only the newest of several requests.)"""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()

    @property
    def _too_large(self) -> HeaderTooLarge:
        return HeaderTooLarge(f"request line and headers are longer than {self._limits.header_bytes} bytes")

    async def _header_too_large(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        await send_error(self._too_large, send)


class _Outlet:
    """A connection as one of its requests sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        """After an answer. Bytes that the client still sends are read first."""
        if self._connection.cycle.more_body:
            self._connection.linger()
        else:
            self._connection.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _check_readable(files: Mapping[str, str | None]) -> None:
    """files: by the option that names each. Raises OptionError; the ssl module would not say which one it is."""
    for option, path in files.items():
        try:
            if path is not None:
                open(path, "rb").close()
        except OSError as error:
            raise OptionError(f"{option} {path}: {error.strerror}; give a PEM file that this user may read") from None


class HttpServer(uvicorn.Server):
    """Serves until `should_exit`; what is still open then is closed within `timeout_graceful_shutdown` seconds."""

    def __init__(self, app: AsgiApp, limits: Limits, ssl_keyfile: str | None, ssl_certfile: str | None) -> None:
        """Raises OptionError if key and certificate cannot be used."""
        config = uvicorn.Config(
            app,
            http=functools.partial(Connection, limits),  # type: ignore[arg-type]
            ssl_keyfile=ssl_keyfile,
            ssl_certfile=ssl_certfile,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        _check_readable({"--ssl-keyfile": ssl_keyfile, "--ssl-certfile": ssl_certfile})
        try:
            config.load()
        except ssl.SSLError as error:
            raise OptionError(
                f"--ssl-keyfile {ssl_keyfile}, --ssl-certfile {ssl_certfile}: {error}; both must be PEM files, and the "
                "certificate made for the key"
            ) from None
        super().__init__(config)
        # Our own lines say the rest, and not one for every bad client.
        logging.getLogger("uvicorn").setLevel(logging.ERROR)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the daemon decides what a signal means
