"""API keys: if any are set, every route except the probes and the page's files requires `Authorization: Bearer <key>`
or `X-Api-Key: <key>`."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_llm.server.http.errors import Unauthorized, send_error
from serve_llm.server.web_ui.files import PAGE_FILES

# The page is the same for everyone; it asks for the key, and its script sends it.
OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/docs", *PAGE_FILES})
ADMINISTRATOR_PREFIX = "admin:"  # keys with this prefix may load and unload adapters
TENANT = "serve_llm.tenant"  # key in the ASGI scope: the index of the request's API key, if keys are set

IN_BATCH = "serve_llm.in_batch"  # key in the ASGI scope: the request is a line of a stored batch


class ApiKeyMiddleware:
    """ASGI middleware. Without keys, every request is accepted."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests:
            scope[TENANT] = self._find_key(scope)
            if scope[TENANT] is None and scope["path"] not in OPEN_PATHS:
                message = "a valid API key is required: Authorization: Bearer <key>, or x-api-key: <key>"
                await send_error(Unauthorized(message), send)
                return
        await self.app(scope, receive, send)

    def _find_key(self, scope: Scope) -> int | None:
        """Find the index of the request's key; None if it has no valid key."""
        keys = []
        for name, value in scope["headers"]:
            if name == b"x-api-key":
                keys.append(value)
            elif name == b"authorization":
                scheme, _, key = value.partition(b" ")
                if scheme.lower() == b"bearer":
                    keys.append(key)
        # Compare all keys, as digests of equal length, so that timing reveals nothing about any of them.
        digests = [_digest(key.strip()) for key in keys]
        matches = [sum(hmac.compare_digest(digest, known) for digest in digests) > 0 for known in self._digests]
        return matches.index(True) if any(matches) else None


def name_owner(key: str) -> str:
    """The name under which objects of an API key are stored. It does not reveal the key."""
    return _digest(b"owner:" + key.encode()).hex()[:32]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
