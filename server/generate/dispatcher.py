"""What a generation needs of the engines: their clock, and how to submit and abort requests.

`LocalDispatcher` serves generations in the process that owns the engines,
`server.front_ends.dispatcher.RemoteDispatcher` those in a front end process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from serve_llm.common.errors import EngineError
from serve_llm.common.types import ModelInfo, Output, Request
from serve_llm.server.admission.controller import AdmissionController, AdmissionRequest
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.engines.tracked_request import Replay, TrackedRequest
from serve_llm.server.http.errors import RequestError, Unavailable
from serve_llm.server.metrics.meter import Clock, Meter

Pairs = Sequence[tuple[Request, Callable[[Output], None]]]  # requests with their sinks


class SubmittedRequest(Protocol):
    """A request of a generation, as its dispatcher knows it."""

    @property
    def meter(self) -> Meter:
        """Counts for the engine that computes the request."""

    @property
    def engine(self) -> int:
        """Index of the engine that computes the request, or was the last to do so."""

    @property
    def replays(self) -> list[Replay]: ...


class Dispatcher(Protocol):
    @property
    def clock(self) -> Clock: ...

    @property
    def facts(self) -> ModelInfo:
        """Facts that hold for every engine."""

    @property
    def outage(self) -> str | None:
        """Why every engine is gone; None while one is there."""

    def check(self) -> None:
        """Raises Unavailable while no request would be served."""

    def next_id(self) -> int:
        """An id for an engine request."""

    def submit(
        self, admission: AdmissionRequest, pairs: Pairs, refuse: Callable[[RequestError], None]
    ) -> Sequence[SubmittedRequest]:
        """Submit the requests of a generation if it is admitted; `release` ends it. Raises Unavailable or
        DeadlineExceeded if it is not, or calls `refuse` with such an error later, before any sink."""

    def begin(self, admission: AdmissionRequest, num_prompt_tokens: int) -> None:
        """A choice has its first token. num_prompt_tokens: computed for it."""

    def release(self, admission: AdmissionRequest, num_generated: int, *, is_whole: bool) -> None:
        """The generation has ended. num_generated: tokens per choice. is_whole: not cut short by anything."""

    def abort(self, ids: Sequence[int]) -> None:
        """End requests; their sinks are not called again. Ignores ids that have ended already."""

    def seconds_to_begin(self, admission: AdmissionRequest, deadline: float) -> float:
        """Seconds after which a request without a token can no longer end by the deadline (clock time)."""


class LocalDispatcher:
    """See `Dispatcher`."""

    def __init__(self, replicas: Replicas, admission: AdmissionController | None = None) -> None:
        """admission: None admits everything."""
        self.clock = replicas.clock
        self.next_id = replicas.next_id
        self.abort = replicas.abort
        self._replicas = replicas
        self._admission = admission

    @property
    def facts(self) -> ModelInfo:
        return self._replicas.facts

    @property
    def outage(self) -> str | None:
        return self._replicas.outage

    def check(self) -> None:
        if self._admission is not None:
            self._admission.check()

    def submit(
        self, admission: AdmissionRequest, pairs: Pairs, refuse: Callable[[RequestError], None]
    ) -> list[TrackedRequest]:
        if self._admission is not None:
            self._admission.admit(admission)
        try:
            tracked = self._replicas.submit_many(pairs)
        except BaseException as error:
            self.release(admission, 0, is_whole=False)
            if isinstance(error, EngineError):
                raise Unavailable(str(error)) from None
            raise
        if self._admission is not None:
            self._admission.note_submission(admission, tracked)
        return tracked

    def begin(self, admission: AdmissionRequest, num_prompt_tokens: int) -> None:
        if self._admission is not None:
            self._admission.begin(admission, num_prompt_tokens)

    def release(self, admission: AdmissionRequest, num_generated: int, *, is_whole: bool) -> None:
        if self._admission is not None:
            self._admission.release(admission, num_generated, is_whole=is_whole)

    def seconds_to_begin(self, admission: AdmissionRequest, deadline: float) -> float:
        if self._admission is None:
            return deadline - self.clock.read()
        return self._admission.seconds_to_begin(admission, deadline)
