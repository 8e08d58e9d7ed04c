"""Which requests may start, and which wait in the queue: bounded, measured, fair to every key.

A request waits until its first token. When the queue is full, the newest one of the key that waits for most makes room,
so that nobody fills it for the others. Knows neither HTTP nor text.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

from serve_llm.server.errors import DeadlineExceeded, RequestError, Unavailable
from serve_llm.server.metrics import Meter
from serve_llm.server.replicas import Replicas
from serve_llm.server.throughput import Pace, Throughput

logger = logging.getLogger(__name__)

REQUEST_TOKENS = 128  # what a waiting request counts for besides its prompt's tokens: it takes a place in every step
MESSAGES = {"not_ready": "the model is not ready", "draining": "the server is shutting down"}
REASONS = ("not_ready", "draining", "queue_full", "deadline")  # to refuse a request


class Applicant(NamedTuple):
    """What admission looks at. `deadline`: in the meter's time; None: as long as it takes."""

    tenant: int
    priority: int
    num_requests: int  # choices
    num_tokens: int  # of its prompts, once each
    max_tokens: int = 1  # that a choice may generate
    deadline: float | None = None

    @property
    def work(self) -> int:
        return self.num_tokens + REQUEST_TOKENS * self.num_requests


class Ticket:
    """An open request: `with ticket: ...`."""

    def __init__(self, gate: Gate, applicant: Applicant, end: Callable[[RequestError], None]) -> None:
        """`end`: ends it before its time."""
        self.end = end
        self.applicant = applicant
        self.num_requests, self.num_tokens = applicant.num_requests, applicant.num_tokens  # that still wait
        self.began_at: float | None = None  # None: nothing was sent, so it can still be refused
        self.num_generated = 0  # tokens of each choice, set before the end
        self.is_whole = False  # ended by itself, set before the end
        self.num_restarts = gate.num_restarts
        self._gate = gate

    def began(self, num_tokens: int) -> None:
        """One of its choices has its first token, and so many prompt tokens are computed."""
        self._gate.take_out(self, 1, num_tokens, served=True)

    def seconds_to_begin(self) -> float | None:
        """After which the rest would not be done before the deadline; None without one."""
        return self._gate.seconds_to_begin(self.applicant)

    def expire(self) -> None:
        """Ends it if it has not begun, so that nothing is computed for a request that would end too late."""
        if self.began_at is None:
            self._gate.expire(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._gate.close(self)


class Gate:
    """All open requests. Set `draining`, await `drained()`, then `end_open()` what is left, to end in order."""

    def __init__(
        self,
        replicas: Replicas,
        max_queue: tuple[int, int],
        clock: Callable[[], float] = Meter.clock,
        spread: Callable[[], float] = random.random,
    ) -> None:
        """`max_queue`: requests and prompt tokens that may wait. `spread`: from 0 to 1, so that those who are refused
        do not come back all at once."""
        self._replicas = replicas
        self.max_queue = max_queue
        self._clock = clock
        self._spread = spread
        self._open: dict[Ticket, None] = {}  # by arrival
        self._engines_were = True, 0  # ready, and how often replaced, at the last `_advance`
        self._waiting: Counter[tuple[int, int]] = Counter()  # (priority, tenant) -> work
        self._throughput = Throughput()
        self._pace = Pace()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        self.num_requests = self.num_tokens = 0  # that wait
        self.refused = dict.fromkeys(REASONS, 0)

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_restarts(self) -> int:
        return self._replicas.num_restarts

    @property
    def obstacle(self) -> str | None:
        """Why no request at all would be served now, one of REASONS."""
        return "draining" if self.draining else None if self._replicas.ready else "not_ready"

    def check(self) -> None:
        """Raises Unavailable, and counts a refusal, while the engine is not ready or the server is draining."""
        if (reason := self.obstacle) is not None:
            raise self._refusal(reason, MESSAGES[reason])

    def admit(self, applicant: Applicant, end: Callable[[RequestError], None]) -> Ticket:
        """Raises Unavailable when the queue is full, or when the deadline cannot be met by the measured throughput,
        DeadlineExceeded when it has passed."""
        self.check()
        self._check_deadline(applicant)
        self._make_room(applicant)
        self._advance()
        ticket = Ticket(self, applicant, end)
        self._open[ticket] = None
        self._waiting[applicant.priority, applicant.tenant] += applicant.work
        self.num_requests += applicant.num_requests
        self.num_tokens += applicant.num_tokens
        self._empty.clear()
        return ticket

    def expected_wait(self, applicant: Applicant) -> float | None:
        """Seconds to its first token: its fair share of what waits and itself, by the throughput measured while
        requests waited. None: not known yet."""
        rate = self._throughput.rate
        if rate is None:
            return None
        own = self._waiting[applicant.priority, applicant.tenant] + applicant.work
        work = own
        for (priority, tenant), waiting in self._waiting.items():
            if priority < applicant.priority:
                work += waiting
            elif priority == applicant.priority and tenant != applicant.tenant:
                work += min(waiting, own)
        return work / rate

    def seconds_to_begin(self, applicant: Applicant) -> float | None:
        if applicant.deadline is None:
            return None
        return max(0.0, applicant.deadline - self._clock() - self._pace.seconds_for(applicant.max_tokens))

    def _check_deadline(self, applicant: Applicant) -> None:
        if applicant.deadline is None:
            return
        left = applicant.deadline - self._clock()
        if left <= 0:
            raise DeadlineExceeded("the request's time was over before it could start")
        wait = self.expected_wait(applicant)
        needed = 0.0 if wait is None else wait + self._pace.seconds_for(applicant.max_tokens)
        if needed > left:
            message = f"at the present load it would end after about {needed:.1f} s, but {left:.1f} s are left"
            raise self._refusal("deadline", message, needed - left)

    def _make_room(self, applicant: Applicant) -> None:
        """Raises Unavailable if there is none: who waits for most already, with this, is not preferred."""
        while self.num_requests and (
            self.num_requests + applicant.num_requests > self.max_queue[0]
            or self.num_tokens + applicant.num_tokens > self.max_queue[1]
        ):
            loads = Counter[int]()
            for (_, tenant), work in self._waiting.items():
                loads[tenant] += work
            heaviest, load = max(loads.items(), key=lambda item: item[1])
            newest = (one for one in reversed(self._open) if one.began_at is None and one.applicant.tenant == heaviest)
            victim = next(newest, None)
            if heaviest == applicant.tenant or loads[applicant.tenant] + applicant.work >= load or victim is None:
                raise self._full(applicant)
            self.close(victim)
            victim.end(self._full(victim.applicant))

    def _full(self, applicant: Applicant) -> Unavailable:
        message = f"the queue is full: {self.num_requests} requests with {self.num_tokens} prompt tokens wait"
        return self._refusal("queue_full", message, self.expected_wait(applicant) or 0.0)

    def _refusal(self, reason: str, message: str, seconds: float = 0.0) -> Unavailable:
        """`seconds`: until it would be otherwise; the answer spreads those who come back over as long again."""
        self.refused[reason] += 1
        return Unavailable(message, retry_after=max(1, math.ceil(seconds * (1 + self._spread()))))

    def take_out(self, ticket: Ticket, num_requests: int, num_tokens: int, *, served: bool) -> None:
        """So much of an open request waits no longer."""
        self._advance()
        work = num_tokens + REQUEST_TOKENS * num_requests
        if served:
            self._throughput.count(work)
            ticket.began_at = ticket.began_at or self._clock()
        ticket.num_requests -= num_requests
        ticket.num_tokens -= num_tokens
        self.num_requests -= num_requests
        self.num_tokens -= num_tokens
        key = ticket.applicant.priority, ticket.applicant.tenant
        self._waiting[key] -= work
        if not self._waiting[key]:
            del self._waiting[key]

    def expire(self, ticket: Ticket) -> None:
        why = self._replicas.outage
        reason = "it waited too long to be done in time" if why is None else f"it waited for an engine: {why}"
        ticket.end(DeadlineExceeded(f"the request's time is over: {reason}"))

    def _advance(self) -> None:
        """Time in which an engine was replaced says nothing about speed."""
        was, self._engines_were = self._engines_were, (self._replicas.ready, self.num_restarts)
        is_steady = was == self._engines_were and self._replicas.ready
        self._throughput.advance(self._clock(), is_busy=self.num_requests > 0 and is_steady)

    def close(self, ticket: Ticket) -> None:
        """The request is no longer open. Idempotent."""
        if ticket not in self._open:
            return
        del self._open[ticket]
        if ticket.began_at is not None and ticket.num_generated and ticket.num_restarts == self.num_restarts:
            self._pace.count(ticket.num_generated, self._clock() - ticket.began_at, is_whole=ticket.is_whole)
        if ticket.num_requests:
            self.take_out(ticket, ticket.num_requests, ticket.num_tokens, served=False)
        if not self._open:
            self._empty.set()

    async def drained(self) -> None:
        """Returns when no request is open."""
        await self._empty.wait()

    def end_open(self) -> None:
        """End every open request with an error that says why."""
        for ticket in list(self._open):
            ticket.end(Unavailable(MESSAGES["draining"]))


SMALL_BYTES = 2**16  # of a body, that always find room: large ones that come slowly shut out no usual request


class Bodies:
    """Bytes of bodies that are being read, for all requests together; of each, what is more than SMALL_BYTES."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], None]]:
        """Gives a function that takes so many bytes more, which raises Unavailable past the limit; all are given back
        in the end."""
        own = 0

        def take(num_bytes: int) -> None:
            nonlocal own
            more = max(0, own + num_bytes - max(own, SMALL_BYTES))
            if self._held + more > self._limit:
                raise Unavailable("too many large requests are being read")
            own += num_bytes
            self._held += more

        try:
            yield take
        finally:
            self._held -= max(0, own - SMALL_BYTES)
