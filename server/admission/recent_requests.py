"""Open and recently ended requests of all clients and front ends, with their times, for GET /requests.

Records durations and sizes, never content.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from serve_llm.common.logs import LoggedRequest
from serve_llm.common.types import FinishReason
from serve_llm.server.engines.tracked_request import TrackedRequest
from serve_llm.server.metrics.meter import Clock

MAX_REQUESTS = 100  # limit on ended requests that are kept, and on open requests that are listed


class RequestLabel(msgspec.Struct, frozen=True, array_like=True):
    """Identifies an HTTP request."""

    id: str = ""  # X-Request-Id
    route: str = ""


def read_label(request: LoggedRequest | None) -> RequestLabel:
    """request: None if offline."""
    return RequestLabel() if request is None else RequestLabel(request.request_id, request.path)


class RequestRecord(NamedTuple):
    """One HTTP request. Durations are in seconds, None while the phase has not begun."""

    label: RequestLabel
    adapter: str | None
    tenant: int
    engines: tuple[int, ...]  # indices of the engines that compute it, or computed it last
    time: float  # Unix seconds of its admission
    num_choices: int  # for all its prompts together
    prompt_tokens: int  # each prompt counts once
    generated_tokens: int  # received from the engines
    queued: float  # until an engine starts it
    prefill: float | None  # from there to the first token
    decode: float | None  # from there to the last token
    outcome: FinishReason | None  # None while it is open
    num_replays: int


class OpenRequest:
    """An admitted HTTP request that has not ended."""

    def __init__(self, label: RequestLabel, tenant: int, tracked: Sequence[TrackedRequest], now: float) -> None:
        """tracked: its choices. now: clock time."""
        self._label = label
        self._tenant = tenant
        self._tracked = tracked
        self._time = time.time()
        self._submitted = now

    def describe(self, now: float) -> RequestRecord:
        """Build the record of a request that is open at this clock time."""
        return self._describe(now, None)

    def describe_end(self, now: float, *, is_whole: bool) -> RequestRecord:
        """now: clock time at which it was left. is_whole: it ended by itself."""
        reasons = {tracked.finish_reason for tracked in self._tracked}
        if FinishReason.ERROR in reasons:
            outcome = FinishReason.ERROR
        elif not is_whole:
            outcome = FinishReason.ABORT
        else:  # stop strings and repetitions are found outside the engines, so their reason is missing here
            outcome = FinishReason.LENGTH if FinishReason.LENGTH in reasons else FinishReason.STOP
        ends = [tracked.finished_at for tracked in self._tracked if tracked.finished_at is not None]
        return self._describe(max(ends) if len(ends) == len(self._tracked) else now, outcome)

    def _describe(self, end: float, outcome: FinishReason | None) -> RequestRecord:
        begun = [tracked for tracked in self._tracked if tracked.first_output_at is not None]
        first_output = min((tracked.first_output_at or 0.0 for tracked in begun), default=None)
        if first_output is None:
            queued, prefill, decode = end - self._submitted, None, None
        else:
            in_queue = min(tracked.queued_seconds for tracked in begun)
            scheduled = min(self._submitted + in_queue, first_output)
            queued, prefill, decode = scheduled - self._submitted, first_output - scheduled, end - first_output
        requests = [tracked.request for tracked in self._tracked]
        adapter = requests[0].adapter
        return RequestRecord(
            label=self._label,
            adapter=None if adapter is None else adapter.name,
            tenant=self._tenant,
            engines=tuple(sorted({tracked.engine for tracked in self._tracked})),
            time=self._time,
            num_choices=len(self._tracked),
            prompt_tokens=sum(len(one.prompt_ids) for one in requests if one.sampling.choice == 0),
            generated_tokens=sum(tracked.num_received for tracked in self._tracked),
            queued=queued,
            prefill=prefill,
            decode=decode,
            outcome=outcome,
            num_replays=sum(len(tracked.replays) for tracked in self._tracked),
        )


class RecentRequests:
    """The open requests, and the latest MAX_REQUESTS that have ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[OpenRequest, None] = {}  # in order of admission
        self._ended: deque[RequestRecord] = deque(maxlen=MAX_REQUESTS)  # the newest last

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self, label: RequestLabel, tenant: int, tracked: Sequence[TrackedRequest]) -> OpenRequest:
        """Record a request that was submitted to the engines; `close` ends it."""
        request = OpenRequest(label, tenant, tracked, self._clock.read())
        self._open[request] = None
        return request

    def close(self, request: OpenRequest, *, is_whole: bool) -> None:
        """Idempotent."""
        if request in self._open:
            del self._open[request]
            self._ended.append(request.describe_end(self._clock.read(), is_whole=is_whole))

    def list_records(self) -> list[RequestRecord]:
        """The oldest open and the newest ended requests, ordered by admission, newest first."""
        now = self._clock.read()
        oldest = [request.describe(now) for request, _ in zip(self._open, range(MAX_REQUESTS), strict=False)]
        return sorted([*self._ended, *oldest], key=lambda record: record.time, reverse=True)
