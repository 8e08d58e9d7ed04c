"""Requests that wait for work in other threads before they can be scheduled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Generic, TypeVar

from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason

WAIT_SECONDS = 0.01  # wait when idle; delays incoming messages by at most this

Result = TypeVar("Result")


class PendingRequests(Generic[Result]):
    """For use in the engine's thread only."""

    def __init__(self, find_error: Callable[[Future[Result]], str]) -> None:
        """find_error: called with a finished future; returns why its request cannot be scheduled, or ""."""
        self._find_error = find_error
        self._pending: dict[int, tuple[EngineCoreRequest, Future[Result]]] = {}  # by request id

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request: EngineCoreRequest, future: Future[Result]) -> None:
        """`take_ready` returns the request once the future is done."""
        self._pending[request.id] = (request, future)

    def abort(self, request_id: int) -> None:
        self._pending.pop(request_id, None)

    def take_ready(self, is_idle: bool) -> tuple[list[EngineCoreRequest], list[EngineCoreOutput]]:
        """Return requests that are ready, in order of arrival, and the final outputs of those that failed.

        is_idle: there is nothing else to do, so this may wait briefly.
        """
        if is_idle:
            wait([future for _, future in self._pending.values()], WAIT_SECONDS, FIRST_COMPLETED)
        ready: list[EngineCoreRequest] = []
        failed: list[EngineCoreOutput] = []
        for request, future in list(self._pending.values()):
            if not future.done():
                continue
            del self._pending[request.id]
            if error := self._find_error(future):
                failed.append(
                    EngineCoreOutput(id=request.id, token_ids=[], finish_reason=FinishReason.ERROR, error=error)
                )
            else:
                ready.append(request)
        return ready, failed
