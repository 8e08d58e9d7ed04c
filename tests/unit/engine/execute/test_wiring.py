"""Who shares which memory, and what each rank is told, on one host and on several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve_llm.engine.execute.control import RingEnds, Rings, Span, StepsUrl, Wire, Wired, encode
from serve_llm.engine.execute.wiring import HostWiring, Wiring
from serve_llm.engine.parallel.encrypted import Endpoint
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.parallel.ring import Ring


def test_two_stages_of_two() -> None:
    wiring = HostWiring(Grid(2, 2), range(4), step_bytes=1000)
    rings = [wiring.rings(rank) for rank in range(4)]
    assert rings[0].tensor == rings[1].tensor != rings[2].tensor == rings[3].tensor
    assert [one.previous for one in rings] == [None, None, rings[0].next, rings[1].next]
    assert rings[2].next is rings[3].next is None and rings[0].next != rings[1].next
    assert len(encode(rings)) < 1000


def test_one_host_alone_has_all_to_say_at_once() -> None:
    wiring = Wiring(Grid(2, 2), ["h"] * 4, "h", 1000, None)
    assert wiring.requests() == {} and wiring.span is None and not wiring.tensor_groups_that_span
    ends = [wiring.steps(rank) for rank in range(4)]
    assert all(isinstance(one, RingEnds) for one in ends)
    assert [one.reader for one in ends if isinstance(one, RingEnds)] == [0, 1, 2, 3]
    assert len({one.steps for one in ends if isinstance(one, RingEnds)}) == 1
    assert [one.answers is not None for one in ends if isinstance(one, RingEnds)] == [False, False, True, False]


def test_gpus_of_one_host_meet_in_a_store_and_share_steps_only() -> None:
    wiring = Wiring(Grid(2, 2), ["h"] * 4, "h", 1000, None, on_gpus=True)
    assert wiring.requests() == {0: Wire(2, 2, [], 1000, True)}
    wiring.take({0: Wired({}, 4711)}, [""] * 4)
    assert [wiring.rings(rank) for rank in range(4)] == [Rings([], None, None)] * 4
    assert wiring.span == Span(["h"] * 4, "127.0.0.1", 4711)
    assert all(isinstance(wiring.steps(rank), RingEnds) for rank in range(4))
    assert Wiring(Grid(), ["h"], "h", 1000, None, on_gpus=True).requests() == {}


def test_one_rank_needs_steps_only() -> None:
    assert HostWiring(Grid(), range(1), step_bytes=1).rings(0) == Rings([], None, None)


def test_closing_closes_every_ring() -> None:
    wiring = Wiring(Grid(2, 2), ["h"] * 4, "h", 1, None)
    rings, first = [wiring.rings(rank) for rank in range(4)], wiring.steps(2)
    assert isinstance(first, RingEnds)
    handles = {one.next or one.previous for one in rings} | {handle for one in rings for handle in one.tensor}
    handles |= {first.steps, first.answers}
    assert len(handles) == 2 + 4 + 2
    assert not any(Ring.open(handle).memory.closed for handle in handles)
    wiring.close()
    assert all(Ring.open(handle).memory.closed for handle in handles)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint("127.0.0.1", "secret")
    yield made
    made.close()


def test_a_stage_on_each_host(endpoint: Endpoint) -> None:
    """Memory inside the stages, none between them; the first rank of the other host makes that host's."""
    wiring = Wiring(Grid(2, 2), ["a", "a", "b", "b"], "a", 1000, endpoint)
    assert wiring.requests() == {0: Wire(2, 2, [], 1000, True), 2: Wire(2, 2, [2, 3], 1000, False)}
    there = HostWiring(Grid(2, 2), [2, 3], 1000)
    wiring.take({0: Wired({}, 4711), 2: Wired({rank: there.rings(rank) for rank in (2, 3)}, 0)}, ["x", "x", "y", "y"])
    rings = [wiring.rings(rank) for rank in range(4)]
    assert [len(one.tensor) for one in rings] == [2, 2, 2, 2]
    assert not any(one.previous or one.next for one in rings)
    assert wiring.span is not None
    assert (wiring.span.host_ids, wiring.span.store, wiring.span.store_port) == (["a", "a", "b", "b"], "x", 4711)
    assert [type(wiring.steps(rank)) for rank in range(4)] == [RingEnds, RingEnds, StepsUrl, StepsUrl]
    assert [wiring.steps(rank).answers for rank in (0, 1)] == [None, None], "rank 2 answers, by its socket"
    assert [wiring.local_ranks(rank) for rank in (1, 2)] == [[0, 1], [2, 3]]
    assert wiring.tensor_groups_that_span == []


def test_a_tensor_group_over_hosts(endpoint: Endpoint) -> None:
    wiring = Wiring(Grid(5, 1), ["a", "a", "b", "b", "c"], "a", 1000, endpoint)
    assert wiring.tensor_groups_that_span == [range(5)]
    assert [request.ranks for request in wiring.requests().values()] == [[], [2, 3], [4]]
    assert len(wiring.rings(0).tensor) == 2
    there = HostWiring(Grid(5, 1), [4], 1000)
    assert there.rings(4).tensor == []


def test_stages_that_lie_on_two_hosts(endpoint: Endpoint) -> None:
    """Three hosts, two ranks each, groups of three: a link inside the middle host there is not, but memory there is."""
    wiring = Wiring(Grid(3, 2), ["a", "a", "b", "b", "c", "c"], "a", 1000, endpoint)
    assert wiring.tensor_groups_that_span == [range(3), range(3, 6)]
    middle = HostWiring(Grid(3, 2), [2, 3], 1000)
    assert middle.rings(2) == middle.rings(3) == Rings([], None, None)
    assert len(wiring.rings(1).tensor) == 2 and wiring.rings(1).next is None


def test_an_engine_without_ranks_of_its_own(endpoint: Endpoint) -> None:
    wiring = Wiring(Grid(2, 1), ["b", "b"], "a", 1000, endpoint)
    assert wiring.requests() == {0: Wire(2, 1, [0, 1], 1000, False)}
    assert wiring.span is None and not wiring.needs_store
    assert all(isinstance(wiring.steps(rank), StepsUrl) for rank in (0, 1))
    wiring.channel()
    wiring.close()
