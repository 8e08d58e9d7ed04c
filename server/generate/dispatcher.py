"""What a generation needs from the engines: their clock, and ways to submit and abort requests.

`LocalDispatcher` serves generations in the process that owns the engines,
`server.front_ends.dispatcher.RemoteDispatcher` those in a front-end process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from serve_llm.common.errors import EngineError
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, ModelInfo
from serve_llm.server.admission.controller import AdmissionController, AdmissionRequest
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.engines.tracked_request import Replay, TrackedRequest
from serve_llm.server.http.errors import RequestError, Unavailable
from serve_llm.server.metrics.meter import Clock, Meter

Pairs = Sequence[tuple[EngineCoreRequest, Callable[[EngineCoreOutput], None]]]  # requests with their sinks


class SubmittedRequest(Protocol):
    """A generation's submitted request, as the dispatcher tracks it."""

    @property
    def meter(self) -> Meter:
        """The meter of the engine that computes the request."""

    @property
    def engine(self) -> int:
        """Index of the engine that computes the request or computed it last."""

    @property
    def replays(self) -> list[Replay]: ...


class Dispatcher(Protocol):
    @property
    def clock(self) -> Clock: ...

    @property
    def model_info(self) -> ModelInfo:
        """What holds for every engine."""

    @property
    def outage(self) -> str | None:
        """Why all engines are gone; None while any is left."""

    def check(self) -> None:
        """Raise Unavailable while no request can be served."""

    def next_id(self) -> int:
        """Return a new id for an engine request."""

    def submit(
        self, admission: AdmissionRequest, pairs: Pairs, refuse: Callable[[RequestError], None]
    ) -> Sequence[SubmittedRequest]:
        """Submit the requests of a generation if it is admitted; `release` ends it. Otherwise raises Unavailable or
        DeadlineExceeded, or later calls `refuse` with such an error, before any sink is called."""

    def begin(self, admission: AdmissionRequest, num_prompt_tokens: int) -> None:
        """Report the first token of a choice. num_prompt_tokens: prompt tokens computed for it."""

    def release(self, admission: AdmissionRequest, num_generated: int, *, is_whole: bool) -> None:
        """Report the end of a generation. num_generated: tokens per choice. is_whole: it ended by itself."""

    def abort(self, ids: Sequence[int]) -> None:
        """Abort requests; their sinks are not called again. Ignores ids that have already ended."""

    def seconds_to_begin(self, admission: AdmissionRequest, deadline: float) -> float:
        """Seconds until a request without a token can no longer meet the deadline (clock time)."""


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
    def model_info(self) -> ModelInfo:
        return self._replicas.model_info

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
            self.abort([request.id for request, _ in pairs])
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
