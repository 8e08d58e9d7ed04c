"""Request ids, in and out, and one line per HTTP request at level debug. Never a prompt, never a text, never a key.

The form of log lines is `engine.logs`' business.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

_FIT = re.compile(rb"[\x21-\x7e]{1,128}")  # printable, one line: it goes into a header and into the log


class RequestIds:
    """ASGI around everything: a client's X-Request-Id, or a new one, comes back with every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _FIT.fullmatch(given) else uuid.uuid4().hex.encode()
        began, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if logger.isEnabledFor(logging.DEBUG):
                seconds = time.perf_counter() - began
                line = "%s %r: status %d after %.3f s, request id %s"
                logger.debug(line, scope["method"], scope["path"], status, seconds, request_id.decode())
