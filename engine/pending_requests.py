"""Requests that wait for work in other threads before they can be scheduled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Generic, TypeVar

from serve_llm.common.types import FinishReason, Output, Request

WAIT_SECONDS = 0.01  # used when there is nothing else to do; messages that arrive wait this long

Result = TypeVar("Result")


class PendingRequests(Generic[Result]):
    """Use it only in the engine's thread."""

    def __init__(self, find_error: Callable[[Future[Result]], str]) -> None:
        """find_error: called with futures that are done; returns why their requests cannot be scheduled, or ""."""
        self._find_error = find_error
        self._pending: dict[int, tuple[Request, Future[Result]]] = {}  # by request id

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request: Request, future: Future[Result]) -> None:
        """`take_ready` returns the request once the future is done."""
        self._pending[request.id] = (request, future)

    def abort(self, request_id: int) -> None:
        self._pending.pop(request_id, None)

    def take_ready(self, is_idle: bool) -> tuple[list[Request], list[Output]]:
        """Requests that can go on, in the order in which they came, and the final outputs of those in error.

        is_idle: there is nothing else to do, so that it may wait for a moment.
        """
        if is_idle:
            wait([future for _, future in self._pending.values()], WAIT_SECONDS, FIRST_COMPLETED)
        ready: list[Request] = []
        failed: list[Output] = []
        for request, future in list(self._pending.values()):
            if not future.done():
                continue
            del self._pending[request.id]
            if error := self._find_error(future):
                failed.append(Output(id=request.id, token_ids=[], finish_reason=FinishReason.ERROR, error=error))
            else:
                ready.append(request)
        return ready, failed
