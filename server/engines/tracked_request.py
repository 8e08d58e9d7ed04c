"""The server's record of one open request, from which it can be continued on another engine process.

Sits between the engine client and the sink that turns ids into text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason
from serve_llm.server.metrics.meter import Meter


class RequestObserver(Protocol):
    """`server.engines.replicas.Replicas`, as its requests see it."""

    def on_prompt_computed(self, tracked: TrackedRequest) -> None:
        """Called with the request's first output since it was placed on the engine."""

    def on_finish(self, tracked: TrackedRequest) -> None:
        """Called before the final output is delivered."""

    def on_cleared(self, tracked: TrackedRequest) -> None:
        """Called when the request has made progress since the last engine death (`server.engines.quarantine`)."""


@dataclass
class Replay:
    """One continuation of a request on another engine process, after the loss of its own."""

    lost_at: float  # clock time; the same for all requests that one death interrupted
    cause: str  # why the engine was lost
    num_tokens: int  # prompt and output tokens to recompute
    engine: int  # index of the engine that was lost
    ended_at: float | None = None  # clock time of the next output or the next loss; None until then
    next_engine: int | None = None  # index of the engine that computed it then; None until then


class TrackedRequest:
    """One request from submission to its final output, across all engines that compute it in turn."""

    __slots__ = (
        "_observer",
        "cleared_at",
        "engine",
        "finish_reason",
        "finished_at",
        "first_output_at",
        "id",
        "is_placed",
        "meter",
        "num_deaths",
        "output_ids",
        "queued_seconds",
        "replays",
        "request",
        "sink",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        sink: Callable[[EngineCoreOutput], None],
        observer: RequestObserver,
        meter: Meter,
    ) -> None:
        """sink: called in the event loop with every output. meter: that of engine 0, until the request is placed."""
        self.id = request.id
        # As last submitted. Each submission has a new id, so late outputs of a lost engine are discarded.
        self.request = request
        self.sink = sink
        self.meter = meter  # counts for `engine`
        self.engine = 0  # index of the engine that computes the request or computed it last
        self.is_placed = False
        self.output_ids: list[int] | None = None  # received ids; None before the first output, which may contain no ids
        self.replays: list[Replay] = []
        self.queued_seconds = 0.0  # in the engine's queue, before the first output
        self.first_output_at: float | None = None  # clock time
        self.finished_at: float | None = None  # clock time of the engine's final output
        self.finish_reason: FinishReason | None = None  # the engine's; None also if the request was aborted
        # Kept by the quarantine:
        self.num_deaths = 0  # consecutive deaths of engines that computed this, without progress in between
        self.cleared_at = 0  # number of output ids at which num_deaths returns to 0
        self._observer = observer

    @property
    def num_received(self) -> int:
        return len(self.output_ids or ())

    def receive(self, output: EngineCoreOutput) -> None:
        """Called by the engine client for each output."""
        if output.cached_tokens is not None:  # the first output since the request was placed
            self._observer.on_prompt_computed(self)
            self._end_replay(self.meter.clock.step_time)
            if self.output_ids is not None:  # delivered with the first admission
                output.cached_tokens = None
                output.queued_seconds = None
        if self.output_ids is None:
            self.output_ids = list(output.token_ids)
            self.queued_seconds = output.queued_seconds or 0.0
            self.first_output_at = self.meter.clock.step_time
        else:
            self.output_ids += output.token_ids
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.finished_at = self.meter.clock.step_time
            self._observer.on_finish(self)
        elif self.num_deaths and len(self.output_ids) >= self.cleared_at:
            self._observer.on_cleared(self)
        self.sink(output)

    def begin_replay(self, lost_at: float, cause: str) -> None:
        """Record that the engine that computed the request is gone. lost_at: clock time."""
        self._end_replay(lost_at)
        num_tokens = len(self.request.prompt_ids) + self.num_received
        self.replays.append(Replay(lost_at, cause, num_tokens, self.engine))
        self.meter.count_replayed(num_tokens)

    def _end_replay(self, now: float) -> None:
        if self.replays and self.replays[-1].ended_at is None:
            self.replays[-1].ended_at = now
            self.replays[-1].next_engine = self.engine

    def prepare_resubmission(self, new_id: int) -> None:
        """Prepare `request` for submission to the next engine. Ids that were received are not generated again."""
        self.is_placed = False
        sampling = self.request.sampling
        if self.output_ids is not None and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self.request = msgspec.structs.replace(
            self.request, id=new_id, output_ids=list(self.output_ids or ()), sampling=sampling
        )

    def fail(self, error: str) -> None:
        """Deliver a final output with this error."""
        self.finish_reason = FinishReason.ERROR
        self.sink(EngineCoreOutput(id=self.id, token_ids=[], finish_reason=FinishReason.ERROR, error=error))
