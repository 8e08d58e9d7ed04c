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
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve_llm.engine.errors import OptionError
from serve_llm.engine.limits import Limits
from serve_llm.server.errors import HeaderTooLarge, Unavailable, answer_for, error_body, send_error

logger = logging.getLogger(__name__)

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
    """One connection, which neither a long header nor a client that stands still can keep."""

    def __init__(self, limits: Limits, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._limits = limits
        self._header_bytes: int | None = 0  # received of a header that is not complete; None: it is
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch("sent no request")

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._header_bytes is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes is not None and self._header_bytes > self._limits.header_bytes:
            self._refuse_header()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._watch("stopped in the middle of a request")

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._watch("stopped in the middle of a request")

    def on_headers_complete(self) -> None:
        self._header_bytes = None
        app = self.app
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self._limits.header_bytes:
            self.app = self._header_too_large
        super().on_headers_complete()
        self.app = app

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._header_bytes = 0
        self._unwatch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch("did not read its answer")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unwatch()

    def _watch(self, what: str) -> None:
        self._unwatch()
        self._stalled = self.loop.call_later(self._limits.stall_seconds, self._give_up, what)

    def _unwatch(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _give_up(self, what: str) -> None:
        seconds = self._limits.stall_seconds
        level = (
            logging.WARNING if self.cycle is not None or self._header_bytes else logging.DEBUG
        )  # browsers connect early
        logger.log(level, "Closed the connection of %s: for %g s the client %s", self.client, seconds, what)
        self.transport.abort()  # drops what waits to be written; the request ends as if the client had left

    def _refuse_header(self) -> None:
        answer, body = answer_for(self._too_large), error_body(self._too_large)
        head = f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    @property
    def _too_large(self) -> HeaderTooLarge:
        return HeaderTooLarge(f"request line and headers are longer than {self._limits.header_bytes} bytes")

    async def _header_too_large(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        await send_error(self._too_large, send)


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
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # our own lines say when it starts and stops

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the daemon decides what a signal means
