"""Admission control: a bounded queue, measured and shared fairly among API keys.

A request waits until its first token. When the queue is full, the newest request of the key with the most waiting work
is dropped, so that one key cannot block all others.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from serve_llm.server.admission.recent_requests import OpenRequest, RecentRequests, RequestLabel
from serve_llm.server.admission.throughput import Pace, Throughput
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.engines.tracked_request import TrackedRequest
from serve_llm.server.http.errors import DeadlineExceeded, RequestError, Unavailable

REQUEST_TOKENS = 128  # cost of a waiting request in tokens besides its prompt: it takes part in every step
MESSAGES = {"not_ready": "the model is not ready", "draining": "the server is shutting down"}
REFUSAL_REASONS = ("not_ready", "draining", "queue_full", "deadline")


@dataclass(eq=False, kw_only=True)
class AdmissionRequest:
    """Admission state of one HTTP request, from `admit` to `release`."""

    tenant: int
    priority: int
    max_tokens: int  # the largest of any choice
    deadline: float | None  # clock time
    fail: Callable[[RequestError], None]  # ends the request with an error
    num_waiting: int  # choices without a token yet
    num_waiting_tokens: int  # prompt tokens not computed yet; each prompt counts once
    begin_time: float | None = None  # clock time of the first token; None: the request can still be dropped for others
    num_restarts: int = 0  # engine restarts before the request was admitted
    label: RequestLabel = field(default_factory=RequestLabel)
    record: OpenRequest | None = None  # set when it is submitted to the engines

    def __post_init__(self) -> None:
        self.work = _work(self.num_waiting, self.num_waiting_tokens)  # total cost in tokens


def _work(num_choices: int, num_prompt_tokens: int) -> int:
    return num_prompt_tokens + REQUEST_TOKENS * num_choices


class AdmissionController:
    """Tracks all open requests. To shut down, set `draining`, await `drained()`, then call `end_open()`."""

    def __init__(
        self, replicas: Replicas, max_queue: tuple[int, int], jitter: Callable[[], float] = random.random
    ) -> None:
        """max_queue: limits on waiting requests and prompt tokens. jitter: 0 to 1, spreads Retry-After so that refused
        clients do not all return at once."""
        self.max_queue = max_queue
        self.draining = False
        self.num_waiting = 0  # choices without a token yet
        self.num_waiting_tokens = 0  # their prompt tokens
        self.refused = Counter(dict.fromkeys(REFUSAL_REASONS, 0))
        self.recent = RecentRequests(replicas.clock)
        self._replicas = replicas
        self._clock = replicas.clock
        self._jitter = jitter
        self._open: dict[AdmissionRequest, None] = {}  # in order of arrival
        self._waiting_work: Counter[tuple[int, int]] = Counter()  # (priority, tenant) -> tokens
        self._throughput = Throughput()
        self.pace = Pace()
        self._engine_state = (True, 0)  # (ready, number of restarts) at the last `_advance_throughput`
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def count_open_before(self, priority: int) -> int:
        """Count open requests that are served before those of this priority."""
        return sum(request.priority < priority for request in self._open)

    @property
    def obstacle(self) -> str | None:
        """One of REFUSAL_REASONS if no request can be served now; otherwise None."""
        if self.draining:
            return "draining"
        return None if self._replicas.ready else "not_ready"

    def check(self) -> None:
        """Raises Unavailable, and counts a refusal, while the engine is not ready or the server drains."""
        reason = self.obstacle
        if reason is not None:
            raise self._refuse(reason, MESSAGES[reason])

    def admit(self, request: AdmissionRequest) -> None:
        """Add a request to the queue. The caller must call `release` when the request has ended.

        Raises Unavailable when the queue is full or the measured throughput cannot meet the deadline, DeadlineExceeded
        when the deadline has passed.
        """
        self.check()
        self._check_deadline(request)
        self._make_room(request)
        self._advance_throughput()
        request.num_restarts = self._replicas.num_restarts
        self._open[request] = None
        self._waiting_work[request.priority, request.tenant] += request.work
        self.num_waiting += request.num_waiting
        self.num_waiting_tokens += request.num_waiting_tokens
        self._is_empty.clear()

    def note_submission(self, request: AdmissionRequest, tracked: Sequence[TrackedRequest]) -> None:
        """tracked: the submitted choices of an admitted request."""
        request.record = self.recent.open(request.label, request.tenant, tracked)

    def begin(self, request: AdmissionRequest, num_prompt_tokens: int) -> None:
        """A choice has received its first token. num_prompt_tokens: 0 if another choice of the prompt came first."""
        if request not in self._open:
            return
        self._advance_throughput()
        self._throughput.count(_work(1, num_prompt_tokens))
        if request.begin_time is None:
            request.begin_time = self._clock.read()
        self._take_out(request, 1, num_prompt_tokens)

    def release(self, request: AdmissionRequest, num_generated: int = 0, *, is_whole: bool = False) -> None:
        """Report the end of a request. Idempotent. num_generated: tokens per choice. is_whole: it ended by itself."""
        if request not in self._open:
            return
        del self._open[request]
        if request.record is not None:
            self.recent.close(request.record, is_whole=is_whole)
        was_steady = request.num_restarts == self._replicas.num_restarts
        if request.begin_time is not None and num_generated and was_steady:
            self.pace.count(num_generated, self._clock.read() - request.begin_time, is_whole=is_whole)
        if request.num_waiting:
            self._advance_throughput()
            self._take_out(request, request.num_waiting, request.num_waiting_tokens)
        if not self._open:
            self._is_empty.set()

    def expected_wait(self, request: AdmissionRequest) -> float | None:
        """Seconds to the first token of a request that is not admitted yet; None while throughput is unknown.

        Based on the queued work ahead of it, its own work, and the throughput measured while requests waited. Keys of
        equal priority get equal shares, so another key's work counts at most as much as this key's.
        """
        rate = self._throughput.rate
        if rate is None:
            return None
        own_work = self._waiting_work[request.priority, request.tenant] + request.work
        work = own_work
        for (priority, tenant), waiting in self._waiting_work.items():
            if priority < request.priority:
                work += waiting
            elif priority == request.priority and tenant != request.tenant:
                work += min(waiting, own_work)
        return work / rate

    def seconds_to_begin(self, request: AdmissionRequest, deadline: float) -> float:
        """Seconds until a request without a token can no longer meet the deadline (clock time)."""
        return max(0.0, deadline - self._clock.read() - self.pace.seconds_for(request.max_tokens))

    async def drained(self) -> None:
        """Returns when no request is open."""
        await self._is_empty.wait()

    def end_open(self) -> None:
        """End every open request with an error that names the reason."""
        for request in list(self._open):
            request.fail(Unavailable(MESSAGES["draining"]))

    def _check_deadline(self, request: AdmissionRequest) -> None:
        if request.deadline is None:
            return
        left = request.deadline - self._clock.read()
        if left <= 0:
            raise DeadlineExceeded("the deadline passed before the request could start")
        wait = self.expected_wait(request)
        needed = 0.0 if wait is None else wait + self.pace.seconds_for(request.max_tokens)
        if needed > left:
            message = f"at the present load it would end after about {needed:.1f} s, but {left:.1f} s are left"
            raise self._refuse("deadline", message, needed - left)

    def _make_room(self, request: AdmissionRequest) -> None:
        """Drop requests of the key with the most waiting work until this one fits.

        Raises Unavailable if that is this request's key, or would be once it is admitted. An empty queue has room for a
        request of any size.
        """
        while self.num_waiting and (
            self.num_waiting + request.num_waiting > self.max_queue[0]
            or self.num_waiting_tokens + request.num_waiting_tokens > self.max_queue[1]
        ):
            loads = Counter[int]()
            for (_, tenant), work in self._waiting_work.items():
                loads[tenant] += work
            heaviest, load = max(loads.items(), key=lambda item: item[1])
            newest_first = reversed(self._open)
            evictable = (one for one in newest_first if one.begin_time is None and one.tenant == heaviest)
            victim = next(evictable, None)
            own_load = loads[request.tenant] + request.work
            if heaviest == request.tenant or own_load >= load or victim is None:
                raise self._refuse_for_full_queue(request)
            self.release(victim)
            victim.fail(self._refuse_for_full_queue(victim))

    def _refuse_for_full_queue(self, request: AdmissionRequest) -> Unavailable:
        message = f"the queue is full: {self.num_waiting} requests with {self.num_waiting_tokens} prompt tokens wait"
        return self._refuse("queue_full", message, self.expected_wait(request) or 0.0)

    def _refuse(self, reason: str, message: str, seconds: float = 0.0) -> Unavailable:
        """Count a refusal and build its error. seconds: until a retry can succeed; Retry-After is up to twice that."""
        self.refused[reason] += 1
        return Unavailable(message, retry_after=max(1, math.ceil(seconds * (1 + self._jitter()))))

    def _take_out(self, request: AdmissionRequest, num_choices: int, num_prompt_tokens: int) -> None:
        """Remove this part of an open request from the waiting work."""
        request.num_waiting -= num_choices
        request.num_waiting_tokens -= num_prompt_tokens
        self.num_waiting -= num_choices
        self.num_waiting_tokens -= num_prompt_tokens
        key = (request.priority, request.tenant)
        self._waiting_work[key] -= _work(num_choices, num_prompt_tokens)
        if not self._waiting_work[key]:
            del self._waiting_work[key]

    def _advance_throughput(self) -> None:
        """Call before the queue changes. Skips time in which an engine was being replaced, because it says nothing
        about speed."""
        before = self._engine_state
        self._engine_state = (self._replicas.ready, self._replicas.num_restarts)
        is_steady = before == self._engine_state and self._replicas.ready
        self._throughput.advance(self._clock.read(), is_busy=self.num_waiting > 0 and is_steady)


# Bytes of each body outside the shared budget, so that large slow uploads cannot starve small requests.
SMALL_BYTES = 2**16


class BodyBudget:
    """Limits the total size of the bodies being read; the first SMALL_BYTES of each body are free."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes and raises Unavailable beyond the limit. Releases all of them on
        exit."""
        num_taken = 0

        def take(num_bytes: int) -> None:
            nonlocal num_taken
            more = max(0, num_taken + num_bytes - max(num_taken, SMALL_BYTES))
            if self._held + more > self._limit:
                raise Unavailable("too many large requests are being read")
            num_taken += num_bytes
            self._held += more

        try:
            yield take
        finally:
            self._held -= max(0, num_taken - SMALL_BYTES)
