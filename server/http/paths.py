"""Equivalent forms of a request: superfluous slashes in the path, and HEAD instead of GET."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Where a base URL is joined with a route, often with one slash too many. Elsewhere, slashes may be part of a name, or
# hide a path from a proxy that guards it.
_BASE = re.compile(rb"\A/+(v\d+)/+")


class PathMiddleware:
    """ASGI middleware that ignores doubled slashes around a version such as /v1 and a trailing one, and answers HEAD
    like GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path: str = scope["path"]
        if path.strip("/") and (path.endswith("/") or "//" in path):
            raw_path = scope.get("raw_path") or path.encode()
            scope = {**scope, "path": _simplify(path.encode()).decode(), "raw_path": _simplify(raw_path)}
        if scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self.app({**scope, "method": "GET"}, receive, send_head)


def _simplify(path: bytes) -> bytes:
    return _BASE.sub(rb"/\1/", path).removesuffix(b"/")
