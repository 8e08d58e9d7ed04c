"""The queue: bounded, measured, fair to every key; on a clock that the test turns."""

from __future__ import annotations

import pytest

from serve_llm.engine.errors import EngineDead
from serve_llm.server.admission import REQUEST_TOKENS, SMALL_BYTES, Applicant, Bodies, Gate, Ticket
from serve_llm.server.errors import DeadlineExceeded, RequestError, Unavailable
from serve_llm.server.replicas import Replicas
from serve_llm.server.throughput import Pace, Throughput
from support.fakes import ScriptedEngine


class Desk:
    """A gate whose clock stands still until it is turned, and what became of the requests that it let in."""

    def __init__(self, max_requests: int = 4, max_tokens: int = 1000) -> None:
        self.now = 100.0
        self.ended: list[tuple[int, RequestError]] = []
        self.engine = ScriptedEngine(lambda request: [1])
        self.replicas = Replicas([self.engine])
        self.gate = Gate(self.replicas, (max_requests, max_tokens), clock=lambda: self.now, spread=lambda: 0.0)

    def admit(
        self,
        num_tokens: int = 10,
        tenant: int = 0,
        *,
        priority: int = 0,
        num_requests: int = 1,
        seconds: float | None = None,
    ) -> Ticket:
        deadline = None if seconds is None else self.now + seconds
        applicant = Applicant(tenant, priority, num_requests, num_tokens, max_tokens=10, deadline=deadline)
        return self.gate.admit(applicant, lambda error: self.ended.append((tenant, error)))

    def measure(self, num_requests: int, num_tokens: int, seconds: float) -> float:
        """So many requests take so long. Returns the work per second that this is."""
        for _ in range(num_requests):
            ticket = self.admit(num_tokens)
            self.now += seconds / num_requests
            ticket.began(num_tokens)
            self.gate.close(ticket)
        return num_requests * (num_tokens + REQUEST_TOKENS) / seconds


def test_what_waits_is_counted_until_its_first_token_and_when_it_goes() -> None:
    desk = Desk(10)
    first, second = desk.admit(30, num_requests=2), desk.admit(5)
    assert (desk.gate.num_requests, desk.gate.num_tokens, desk.gate.num_open) == (3, 35, 2)
    first.began(30)
    assert (desk.gate.num_requests, desk.gate.num_tokens) == (2, 5)
    first.began(0)
    with second:
        pass
    assert (desk.gate.num_requests, desk.gate.num_tokens, desk.gate.num_open) == (0, 0, 1)
    desk.gate.close(first)
    desk.gate.close(first)
    assert desk.gate.num_open == 0


@pytest.mark.parametrize(("num_requests", "num_tokens"), [(1, 1), (5, 1), (1, 981)])
def test_past_its_end_the_queue_refuses(num_requests: int, num_tokens: int) -> None:
    desk = Desk(max_requests=5, max_tokens=1000)
    for _ in range(4 if num_requests > 1 or num_tokens > 1 else 5):
        desk.admit(5)
    with pytest.raises(Unavailable, match="the queue is full") as caught:
        desk.admit(num_tokens, num_requests=num_requests)
    assert caught.value.retry_after == 1, "nothing is known yet"
    assert desk.gate.refused["queue_full"] == 1 and desk.ended == []


def test_what_is_larger_than_the_queue_is_served_when_nothing_waits() -> None:
    desk = Desk(max_requests=2, max_tokens=10)
    desk.admit(100, num_requests=3)
    with pytest.raises(Unavailable):
        desk.admit(1)


def test_retry_after_is_the_time_that_the_queue_takes_by_what_was_measured() -> None:
    desk = Desk(max_requests=10, max_tokens=100_000)
    rate = desk.measure(20, 72, 10.0)
    assert rate == pytest.approx(400)
    for _ in range(10):
        desk.admit(872)
    desk.gate._spread = lambda: 0.5
    with pytest.raises(Unavailable) as caught:
        desk.admit(872)
    # the rate that was measured longer ago counts a little less, alike in both sums
    assert caught.value.retry_after == pytest.approx(1.5 * 11 * 1000 / rate, abs=1)


def test_time_without_a_queue_says_nothing_about_speed() -> None:
    desk = Desk()
    before = desk.measure(10, 72, 5.0)
    desk.now += 10_000
    ticket = desk.admit(10)
    assert desk.gate.expected_wait(ticket.applicant) == pytest.approx(2 * ticket.applicant.work / before, rel=0.01)


def test_time_without_an_engine_says_nothing_about_speed() -> None:
    desk = Desk(10)
    replicas, engine = desk.replicas, desk.engine
    rate = desk.measure(20, 72, 10.0)
    begun, waiting = desk.admit(72), desk.admit(72)
    begun.began(72)
    engine.ready = False
    replicas.lose({0: []}, EngineDead("it died"))
    replicas.num_restarts, replicas.first_cause = 1, "it died"
    desk.now += 60
    waiting.expire()
    desk.gate.close(waiting)  # looked at in the middle
    desk.now += 60
    replicas.join({0: ScriptedEngine(lambda request: [1])})
    begun.num_generated = 40
    desk.gate.close(begun)
    applicant = Applicant(0, 0, 1, 72, max_tokens=10, deadline=desk.now + 1)
    assert desk.gate.expected_wait(applicant) == pytest.approx(applicant.work / rate, rel=0.2)
    assert desk.gate.seconds_to_begin(applicant) == 1.0, "how long the others took is not known yet"
    assert "waited for an engine" in str(desk.ended[0][1]) and "it died" in str(desk.ended[0][1])
    desk.admit(72, seconds=1)


def test_the_newest_of_the_heaviest_key_makes_room_for_another() -> None:
    desk = Desk(max_requests=4)
    held = [desk.admit(10, tenant=1) for _ in range(4)]
    held[3].began(10)
    held.append(desk.admit(10, tenant=1))
    light = desk.admit(10, tenant=2)
    assert [(tenant, type(error)) for tenant, error in desk.ended] == [(1, Unavailable)]
    assert light.num_requests == 1 and desk.gate.num_requests == 4
    assert held[4].num_requests == 0, "the newest that has no token yet"
    desk.admit(10, tenant=2)
    assert len(desk.ended) == 2
    for tenant in (1, 2):  # both wait for as much now
        with pytest.raises(Unavailable):
            desk.admit(10, tenant=tenant)
    assert len(desk.ended) == 2


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    desk = Desk(max_requests=100, max_tokens=10**6)
    desk.admit(seconds=0.001)  # nothing is known yet: it may try
    rate = desk.measure(20, 72, 10.0)
    for _ in range(20):
        desk.admit(872)
    wait = desk.gate.expected_wait(Applicant(0, 0, 1, 10))
    assert wait is not None and wait > 20_000 / rate
    with pytest.raises(Unavailable, match=r"it would end after about \d+\.\d s, but 2\.0 s are left") as caught:
        desk.admit(10, seconds=2.0)
    assert caught.value.retry_after == pytest.approx(wait - 2, abs=1) and desk.gate.refused["deadline"] == 1
    desk.admit(10, seconds=wait + 1)
    desk.admit(10, tenant=1, seconds=2.0)  # another key need not wait for all of that
    desk.admit(10, priority=-1, seconds=2.0)
    with pytest.raises(DeadlineExceeded):
        desk.admit(10, seconds=0)


def test_what_others_took_after_their_first_token_counts_as_well() -> None:
    desk = Desk(max_requests=100, max_tokens=10**6)
    desk.measure(20, 72, 2.0)
    for _ in range(50):
        with desk.admit() as ticket:
            ticket.began(10)
            desk.now += 4.0
            ticket.num_generated, ticket.is_whole = 40, True
    with pytest.raises(Unavailable, match="about 1"):  # 10 of the tokens that take 0.1 s each
        desk.admit(seconds=0.9)
    waiting = desk.admit(seconds=1.5)
    assert waiting.seconds_to_begin() == pytest.approx(0.5, abs=0.01)
    waiting.expire()
    assert [type(error) for _, error in desk.ended] == [DeadlineExceeded]
    begun = desk.admit(seconds=1.5)
    begun.began(10)
    begun.expire()
    assert len(desk.ended) == 1


def test_those_that_were_cut_short_do_not_make_requests_look_short() -> None:
    pace = Pace()
    for _ in range(50):
        pace.count(40, 4.0, is_whole=True)
        pace.count(10, 1.0, is_whole=False)
    assert pace.seconds_for(100) == pytest.approx(4.0)
    for _ in range(200):  # all are late now, and slower
        pace.count(10, 2.0, is_whole=False)
    assert pace.seconds_for(100) == pytest.approx(8.0, rel=0.01)


def test_a_pace_that_varies_is_not_counted_on() -> None:
    pace = Pace()
    for place in range(200):
        pace.count(10, 1.0 if place % 2 else 3.0, is_whole=True)
    assert 3.5 < pace.seconds_for(10) < 4.5  # the mean and twice what it is off


def test_draining_ends_what_is_left_with_the_reason() -> None:
    desk = Desk()
    desk.admit(tenant=3)
    desk.gate.draining = True
    with pytest.raises(Unavailable, match="shutting down"):
        desk.admit()
    desk.gate.end_open()
    assert [(tenant, str(error)) for tenant, error in desk.ended] == [(3, "the server is shutting down")]


def test_throughput_forgets_slowly() -> None:
    throughput = Throughput()
    assert throughput.rate is None
    now = 0.0
    for speed in (100.0, 1000.0):
        for _ in range(600):
            throughput.advance(now, is_busy=True)
            throughput.count(speed * 0.1)
            now += 0.1
        assert throughput.rate == pytest.approx(speed, rel=0.05)


def test_bodies_are_bounded_together_and_given_back() -> None:
    bodies = Bodies(100)
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
            small(SMALL_BYTES)  # there is always room for it
    with bodies.reading() as third:
        third(SMALL_BYTES + 100)
