"""The key check: with keys set, every route but the probes wants `Authorization: Bearer <one of them>`."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from serve_llm.server.errors import Unauthorized, send_error

OPEN_PATHS = frozenset({"/health", "/ready"})
TENANT = "serve_llm.tenant"  # in the scope: the number of the request's key, where keys are set


class KeyCheck:
    """ASGI around the app. Without keys everything passes."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests:
            scope[TENANT] = self._key_of(scope)
            if scope[TENANT] is None and scope["path"] not in OPEN_PATHS:
                await send_error(Unauthorized("a valid API key is required: Authorization: Bearer <key>"), send)
                return
        await self.app(scope, receive, send)

    def _key_of(self, scope: Scope) -> int | None:
        """The number of the key that the request brings, None without a valid one."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        # All keys are compared, as digests of equal length, so that time tells nothing about any of them.
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return matches.index(True) if kind.lower() == b"bearer" and any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
