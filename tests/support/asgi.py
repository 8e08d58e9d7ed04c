"""Calls of an ASGI app in the test's event loop: complete calls, and calls driven message by message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Scope


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    content: bytes

    def json(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.content)
        return found

    def events(self) -> list[dict[str, object]]:
        """Parse a stream's events; the stream must have its end."""
        lines = self.content.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-2:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


class Call:
    """One request. `finished` is set when the app returns; messages it sent are in `sent`."""

    def __init__(
        self, app: ASGIApp, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.sent: list[Message] = []
        self.news = asyncio.Event()  # set when something was sent
        self.may_send = asyncio.Event()  # cleared: the client does not read
        self.may_send.set()
        self._left = asyncio.Event()
        self._body: bytes | None = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        path, _, query = path.partition("?")
        encoded = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"test"), *encoded],
            "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }
        self.finished = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """Disconnect the client."""
        self._left.set()

    async def reply(self) -> Reply:
        await self.finished
        start = self.sent[0]
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        content = b"".join(message.get("body", b"") for message in self.sent[1:])
        return Reply(start["status"], headers, content)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.may_send.wait()
        self.sent.append(message)
        self.news.set()


def fetch(app: ASGIApp, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Reply:
    """Make a complete call in its own event loop."""

    async def call() -> Reply:
        return await Call(app, method, path, body, headers).reply()

    return asyncio.run(call())
