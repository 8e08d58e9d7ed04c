"""Calls of the app within its own process: no socket and no HTTP parser, but the same routes, limits and errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Scope

logger = logging.getLogger(__name__)


class LocalResponse(NamedTuple):
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


async def post_locally(app: ASGIApp, path: str, body: bytes, state: Mapping[str, object]) -> LocalResponse:
    """state: added to the scope. Cancelling this call aborts the request's generation."""
    call = _LocalCall(body)
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
        **state,
    }
    try:
        await app(scope, call.receive, call.send)
    except Exception:
        if not call.status:
            raise
        logger.exception("request to %s failed", path)  # after its answer, which reports the error
    return LocalResponse(call.status, call.headers, b"".join(call.chunks))


class _LocalCall:
    """The client's side of one call."""

    def __init__(self, body: bytes) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: list[bytes] = []
        self._body: bytes | None = body

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()  # this client never disconnects
        body = self._body
        self._body = None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
        else:
            self.chunks.append(message.get("body", b""))
