"""Limit how many requests of stored batches run at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serve_llm.common.types import LOWEST_PRIORITY
from serve_llm.server.admission.controller import AdmissionController
from serve_llm.server.metrics.meter import BatchCounts


class BatchSlots:
    """`limit` slots while no other request is open, otherwise one: batches make progress and hardly slow others."""

    def __init__(self, admission: AdmissionController, limit: int, counts: BatchCounts) -> None:
        self._admission = admission
        self._limit = limit
        self._counts = counts
        self._waiters: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        while self._counts.num_running >= self._count_allowed():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._wake()
                raise
        self._counts.num_running += 1
        try:
            yield
        finally:
            self._counts.num_running -= 1
            self._wake()

    def _count_allowed(self) -> int:
        return 1 if self._admission.count_open_before(LOWEST_PRIORITY) else self._limit

    def _wake(self) -> None:
        num_free = self._count_allowed() - self._counts.num_running
        while num_free > 0 and self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                num_free -= 1
