"""Admission control on a clock that the test sets."""

from __future__ import annotations

from typing import Any

import pytest

from serve_llm.common.errors import EngineDead
from serve_llm.server.admission.controller import (
    REQUEST_TOKENS,
    SMALL_BYTES,
    AdmissionController,
    AdmissionRequest,
    BodyBudget,
)
from serve_llm.server.admission.throughput import Pace, Throughput
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.http.errors import DeadlineExceeded, RequestError, Unavailable
from serve_llm.server.metrics.meter import Clock, Meter
from support.fakes import ScriptedEngine


class Desk:
    """An admission controller on a clock that the test sets, and the errors that ended requests."""

    def __init__(self, max_requests: int = 4, max_tokens: int = 1000) -> None:
        self.now = 100.0
        self.ended: list[tuple[int, RequestError]] = []
        self.engine = ScriptedEngine(lambda request: [1], meter=Meter(Clock(lambda: self.now)))
        self.replicas = Replicas([self.engine])
        self.admission = AdmissionController(self.replicas, (max_requests, max_tokens), jitter=lambda: 0.0)

    def request(
        self,
        num_tokens: int = 10,
        tenant: int = 0,
        *,
        priority: int = 0,
        num_choices: int = 1,
        seconds: float | None = None,
    ) -> AdmissionRequest:
        return AdmissionRequest(
            tenant=tenant,
            priority=priority,
            max_tokens=10,
            deadline=None if seconds is None else self.now + seconds,
            fail=lambda error: self.ended.append((tenant, error)),
            num_waiting=num_choices,
            num_waiting_tokens=num_tokens,
        )

    def admit(self, *args: int, **kwargs: Any) -> AdmissionRequest:
        request = self.request(*args, **kwargs)
        self.admission.admit(request)
        return request

    def measure(self, num_requests: int, num_tokens: int, seconds: float) -> float:
        """Serve requests one by one over `seconds`. Returns the work per second."""
        for _ in range(num_requests):
            request = self.admit(num_tokens)
            self.now += seconds / num_requests
            self.admission.begin(request, num_tokens)
            self.admission.release(request)
        return num_requests * (num_tokens + REQUEST_TOKENS) / seconds


def test_waiting_requests_count_until_their_first_token_or_release() -> None:
    desk = Desk(10)
    first, second = desk.admit(30, num_choices=2), desk.admit(5)
    assert (desk.admission.num_waiting, desk.admission.num_waiting_tokens, desk.admission.num_open) == (3, 35, 2)
    desk.admission.begin(first, 30)
    assert (desk.admission.num_waiting, desk.admission.num_waiting_tokens) == (2, 5)
    desk.admission.begin(first, 0)
    desk.admission.release(second)
    assert (desk.admission.num_waiting, desk.admission.num_waiting_tokens, desk.admission.num_open) == (0, 0, 1)
    desk.admission.release(first)
    desk.admission.release(first)
    assert desk.admission.num_open == 0


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(1, 1), (5, 1), (1, 981)])
def test_a_full_queue_refuses_requests(num_requests: int, num_tokens: int) -> None:
    desk = Desk(max_requests=5, max_tokens=1000)
    for _ in range(4 if num_requests > 1 or num_tokens > 1 else 5):
        desk.admit(5)
    with pytest.raises(Unavailable, match="the queue is full") as caught:
        desk.admit(num_tokens, num_choices=num_requests)
    assert caught.value.retry_after == 1, "the throughput is unknown yet"
    assert desk.admission.refused["queue_full"] == 1 and desk.ended == []


def test_an_empty_queue_takes_a_request_of_any_size() -> None:
    desk = Desk(max_requests=2, max_tokens=10)
    desk.admit(100, num_choices=3)
    with pytest.raises(Unavailable):
        desk.admit(1)


def test_retry_after_follows_the_measured_throughput() -> None:
    desk = Desk(max_requests=10, max_tokens=100_000)
    rate = desk.measure(20, 72, 10.0)
    assert rate == pytest.approx(400)
    for _ in range(10):
        desk.admit(872)
    desk.admission._jitter = lambda: 0.5
    with pytest.raises(Unavailable) as caught:
        desk.admit(872)
    # older measurements decay a little, equally in both sums
    assert caught.value.retry_after == pytest.approx(1.5 * 11 * 1000 / rate, abs=1)


def test_idle_time_does_not_lower_the_throughput() -> None:
    desk = Desk()
    before = desk.measure(10, 72, 5.0)
    desk.now += 10_000
    request = desk.admit(10)
    assert desk.admission.expected_wait(request) == pytest.approx(2 * request.work / before, rel=0.01)


def test_an_engine_outage_does_not_lower_the_throughput() -> None:
    desk = Desk(10)
    replicas, engine = desk.replicas, desk.engine
    rate = desk.measure(20, 72, 10.0)
    begun, waiting = desk.admit(72), desk.admit(72)
    desk.admission.begin(begun, 72)
    engine.ready = False
    replicas.drop_lost({0: []}, EngineDead("it died"))
    replicas.num_restarts, replicas.first_cause = 1, "it died"
    desk.now += 60
    desk.admission.release(waiting)  # the queue changes during the outage
    desk.now += 60
    replicas.join({0: ScriptedEngine(lambda request: [1])})
    desk.admission.release(begun, 40)
    request = desk.request(72, seconds=1)
    assert desk.admission.expected_wait(request) == pytest.approx(request.work / rate, rel=0.2)
    assert desk.admission.seconds_to_begin(request, desk.now + 1) == 1.0, "how long the others took is not known yet"
    desk.admit(72, seconds=1)


def test_the_newest_request_of_the_heaviest_key_is_evicted() -> None:
    desk = Desk(max_requests=4)
    held = [desk.admit(10, tenant=1) for _ in range(4)]
    desk.admission.begin(held[3], 10)
    held.append(desk.admit(10, tenant=1))
    light = desk.admit(10, tenant=2)
    assert [(tenant, type(error)) for tenant, error in desk.ended] == [(1, Unavailable)]
    assert light.num_waiting == 1 and desk.admission.num_waiting == 4
    assert held[4].num_waiting == 0, "the newest that has no token yet"
    desk.admit(10, tenant=2)
    assert len(desk.ended) == 2
    for tenant in (1, 2):  # now both have the same amount of waiting work
        with pytest.raises(Unavailable):
            desk.admit(10, tenant=tenant)
    assert len(desk.ended) == 2


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    desk = Desk(max_requests=100, max_tokens=10**6)
    desk.admit(seconds=0.001)  # admitted, as the speed is unknown yet
    rate = desk.measure(20, 72, 10.0)
    for _ in range(20):
        desk.admit(872)
    wait = desk.admission.expected_wait(desk.request(10))
    assert wait is not None and wait > 20_000 / rate
    with pytest.raises(Unavailable, match=r"it would end after about \d+\.\d s, but 2\.0 s are left") as caught:
        desk.admit(10, seconds=2.0)
    assert caught.value.retry_after == pytest.approx(wait - 2, abs=1) and desk.admission.refused["deadline"] == 1
    desk.admit(10, seconds=wait + 1)
    desk.admit(10, tenant=1, seconds=2.0)  # another key does not wait for all of that
    desk.admit(10, priority=-1, seconds=2.0)
    with pytest.raises(DeadlineExceeded):
        desk.admit(10, seconds=0)


def test_deadlines_account_for_the_time_after_the_first_token() -> None:
    desk = Desk(max_requests=100, max_tokens=10**6)
    desk.measure(20, 72, 2.0)
    for _ in range(50):
        request = desk.admit()
        desk.admission.begin(request, 10)
        desk.now += 4.0
        desk.admission.release(request, 40, is_whole=True)
    with pytest.raises(Unavailable, match="about 1"):  # 10 tokens of 0.1 s each
        desk.admit(seconds=0.9)
    waiting = desk.admit(seconds=1.5)
    assert desk.admission.seconds_to_begin(waiting, desk.now + 1.5) == pytest.approx(0.5, abs=0.01)


def test_requests_cut_short_do_not_shorten_the_usual_length() -> None:
    pace = Pace()
    for _ in range(50):
        pace.count(40, 4.0, is_whole=True)
        pace.count(10, 1.0, is_whole=False)
    assert pace.seconds_for(100) == pytest.approx(4.0)
    for _ in range(200):  # all end at their deadline, and generate more slowly
        pace.count(10, 2.0, is_whole=False)
    assert pace.seconds_for(100) == pytest.approx(8.0, rel=0.01)


def test_a_varying_pace_adds_twice_its_error() -> None:
    pace = Pace()
    for place in range(200):
        pace.count(10, 1.0 if place % 2 else 3.0, is_whole=True)
    assert 3.5 < pace.seconds_for(10) < 4.5  # the mean plus twice the error


def test_end_open_names_the_reason() -> None:
    desk = Desk()
    desk.admit(tenant=3)
    desk.admission.draining = True
    with pytest.raises(Unavailable, match="shutting down"):
        desk.admit()
    desk.admission.end_open()
    assert [(tenant, str(error)) for tenant, error in desk.ended] == [(3, "the server is shutting down")]


def test_throughput_decays() -> None:
    throughput = Throughput()
    assert throughput.rate is None
    now = 0.0
    for speed in (100.0, 1000.0):
        for _ in range(600):
            throughput.advance(now, is_busy=True)
            throughput.count(speed * 0.1)
            now += 0.1
        assert throughput.rate == pytest.approx(speed, rel=0.05)


def test_bodies_share_a_budget_and_free_it() -> None:
    bodies = BodyBudget(100)
    with bodies.reading() as first:
        first(SMALL_BYTES)
        first(60)
        with pytest.raises(Unavailable), bodies.reading() as second:
            second(SMALL_BYTES + 30)
            second(30)
        with bodies.reading() as small:
            small(SMALL_BYTES // 2)
            small(SMALL_BYTES // 2)
        first(40)
        with bodies.reading() as small:
            small(SMALL_BYTES)  # outside the budget
    with bodies.reading() as third:
        third(SMALL_BYTES + 100)
