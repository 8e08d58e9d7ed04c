"""Equivalent forms of a request: a trailing slash in the path, and HEAD instead of GET."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class PathMiddleware:
    """ASGI middleware that ignores a trailing slash and answers HEAD like GET, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["path"].endswith("/") and scope["path"].strip("/"):
            raw_path = scope.get("raw_path") or scope["path"].encode()
            scope = {**scope, "path": scope["path"].removesuffix("/"), "raw_path": raw_path.removesuffix(b"/")}
        if scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self.app({**scope, "method": "GET"}, receive, send_head)
