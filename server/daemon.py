"""The HTTP listener: uvicorn without its signal handling, and what answers before the app is there."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn

from serve_llm.server.errors import Unavailable, send_error

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


class HttpServer(uvicorn.Server):
    """Serves until `should_exit`; what is still open then is closed within `timeout_graceful_shutdown` seconds."""

    def __init__(self, app: AsgiApp) -> None:
        config = uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # our own lines say when it starts and stops

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the daemon decides what a signal means
