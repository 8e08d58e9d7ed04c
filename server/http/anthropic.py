"""Middleware for Anthropic's routes: the shape of errors, and a header."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_llm.server.http.anthropic_errors import translate_body, translate_status
from serve_llm.server.http.request_id import REQUEST_ID

VERSION_HEADER = b"anthropic-version"  # Anthropic's clients send it with every request


class AnthropicErrorMiddleware:
    """ASGI middleware that gives error bodies Anthropic's shape and responses a header `request-id`, below /v1/messages
    and, for Anthropic's clients, below /v1/models."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_for_anthropic(scope):
            await self.app(scope, receive, send)
            return
        request_id: str = scope[REQUEST_ID]
        start: Message | None = None  # start of an error response, held back until its body is known

        async def send_translated(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"request-id", request_id.encode())]
                if message["status"] >= 400:
                    start = message
                    return
            elif start is not None:
                body = translate_body(message["body"], start["status"], request_id)
                headers = [entry for entry in start["headers"] if entry[0] != b"content-length"]
                start["headers"] = [*headers, (b"content-length", b"%d" % len(body))]
                start["status"] = translate_status(start["status"])
                await send(start)
                message["body"] = body
            await send(message)

        await self.app(scope, receive, send_translated)


def _is_for_anthropic(scope: Scope) -> bool:
    path: str = scope["path"] + "/"
    if path.startswith("/v1/models/"):
        return any(name == VERSION_HEADER for name, _ in scope["headers"])
    return path.startswith("/v1/messages/")
