"""Adds request ids and trace ids to responses, counts and times requests, and logs one line per HTTP request: at level
debug, or info if it was refused. The line never contains prompts, generated text or keys.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_llm.common.logs import CURRENT_REQUEST, LoggedRequest
from serve_llm.server.metrics.http_meter import NO_ROUTE, HttpMeter

logger = logging.getLogger(__name__)

REQUEST_ID = "serve_llm.request_id"  # key in the ASGI scope
MAX_PATH_CHARACTERS = 200  # longer paths are truncated in the log
_VALID_ID = re.compile(rb"[\x21-\x7e]{1,128}")  # printable, because the id goes into a header and the log


class RequestIdMiddleware:
    """ASGI middleware: every response gets the client's X-Request-Id or a new one; responses to traced requests also
    get `traceresponse`, which identifies the span."""

    def __init__(self, app: ASGIApp, meter: HttpMeter) -> None:
        """meter: counts the requests."""
        self.app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        client_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = client_id if _VALID_ID.fullmatch(client_id) else uuid.uuid4().hex.encode()
        scope[REQUEST_ID] = request_id.decode()
        current = LoggedRequest(request_id.decode(), scope["path"])
        token = CURRENT_REQUEST.set(current)
        began = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
                if current.traceparent:
                    message["headers"].append((b"traceresponse", current.traceparent.encode()))
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - began
            if status:
                route = scope.get("route")  # set by the router
                template = NO_ROUTE if route is None else route.path_format
                self._meter.count(template, scope["method"], status, seconds)
            level = logging.INFO if 400 <= status < 499 else logging.DEBUG
            if logger.isEnabledFor(level):
                path = scope["path"][:MAX_PATH_CHARACTERS]
                line = "%s %r: status %d after %.3f s, request id %s"
                fields = {"method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 6)}
                logger.log(level, line, scope["method"], path, status, seconds, request_id.decode(), extra=fields)
            CURRENT_REQUEST.reset(token)
