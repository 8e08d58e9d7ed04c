"""Whether a request may start now, and how many are open: what draining waits for."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from serve_llm.server.errors import Unavailable
from serve_llm.server.replicas import Replicas


class Gate:
    """Around each open request: `with gate: ...`. Set `draining` and await `drained()` to end in order."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        self.num_open = 0

    def check(self) -> None:
        """Raises Unavailable while the engine is not ready or the server is draining."""
        if self.draining:
            raise Unavailable("the server is shutting down")
        if not self._replicas.ready:
            raise Unavailable("the model is not ready")

    def __enter__(self) -> Self:
        self.check()
        self.num_open += 1
        self._empty.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.num_open -= 1
        if self.num_open == 0:
            self._empty.set()

    async def drained(self) -> None:
        """Returns when no request is open."""
        await self._empty.wait()
