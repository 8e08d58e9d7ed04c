"""Which ranks share which memory, and what each rank is told, on one host and on several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from serve_llm.common.curve_zmq import Endpoint
from serve_llm.engine.distributed.messages import (
    ChannelsReady,
    RankRings,
    Rendezvous,
    SetupChannels,
    StepRings,
    StepsUrl,
    encode,
)
from serve_llm.engine.distributed.shm_setup import HostSetup, RankSetup
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer


def test_two_stages_of_two() -> None:
    setup = HostSetup(ParallelLayout(2, 2), range(4), step_bytes=1000)
    rings = [setup.rings(rank) for rank in range(4)]
    assert rings[0].tensor == rings[1].tensor != rings[2].tensor == rings[3].tensor
    assert [one.previous for one in rings] == [None, None, rings[0].next, rings[1].next]
    assert rings[2].next is rings[3].next is None and rings[0].next != rings[1].next
    assert len(encode(rings)) < 1000


def test_one_host_alone_has_all_to_say_at_once() -> None:
    setup = RankSetup(ParallelLayout(2, 2), ["h"] * 4, "h", 1000, None)
    assert setup.requests() == {} and setup.rendezvous(0) is None and not setup.tp_groups_across_hosts
    ends = [setup.steps(rank) for rank in range(4)]
    assert all(isinstance(one, StepRings) for one in ends)
    assert [one.reader for one in ends if isinstance(one, StepRings)] == [0, 1, 2, 3]
    assert len({one.steps for one in ends if isinstance(one, StepRings)}) == 1
    assert [one.answers is not None for one in ends if isinstance(one, StepRings)] == [False, False, True, False]


def test_gpus_of_one_host_meet_in_a_store_and_share_steps_only() -> None:
    setup = RankSetup(ParallelLayout(2, 2), ["h"] * 4, "h", 1000, None, on_gpus=True)
    assert setup.requests() == {0: SetupChannels(2, 2, [], 1000, True)}
    setup.add_replies({0: ChannelsReady({}, 4711)}, [""] * 4)
    assert [setup.rings(rank) for rank in range(4)] == [RankRings([], None, None)] * 4
    assert setup.rendezvous(3) == Rendezvous(["h"] * 2, "127.0.0.1", 4711)
    assert all(isinstance(setup.steps(rank), StepRings) for rank in range(4))
    assert RankSetup(ParallelLayout(), ["h"], "h", 1000, None, on_gpus=True).requests() == {}


def test_one_rank_needs_steps_only() -> None:
    assert HostSetup(ParallelLayout(), range(1), step_bytes=1).rings(0) == RankRings([], None, None)


def test_closing_closes_every_ring() -> None:
    setup = RankSetup(ParallelLayout(2, 2), ["h"] * 4, "h", 1, None)
    rings, first = [setup.rings(rank) for rank in range(4)], setup.steps(2)
    assert isinstance(first, StepRings)
    handles = {one.next or one.previous for one in rings} | {handle for one in rings for handle in one.tensor}
    handles |= {first.steps, first.answers}
    assert len(handles) == 2 + 4 + 2
    assert not any(ShmRingBuffer.open(handle).memory.closed for handle in handles)
    setup.close()
    assert all(ShmRingBuffer.open(handle).memory.closed for handle in handles)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint("127.0.0.1", "secret")
    yield made
    made.close()


def test_a_stage_on_each_host(endpoint: Endpoint) -> None:
    """Stages share memory inside a host, but not between hosts; the first rank on the other host creates that host's
    memory."""
    setup = RankSetup(ParallelLayout(2, 2), ["a", "a", "b", "b"], "a", 1000, endpoint)
    assert setup.requests() == {0: SetupChannels(2, 2, [], 1000, True), 2: SetupChannels(2, 2, [2, 3], 1000, False)}
    there = HostSetup(ParallelLayout(2, 2), [2, 3], 1000)
    setup.add_replies(
        {0: ChannelsReady({}, 4711), 2: ChannelsReady({rank: there.rings(rank) for rank in (2, 3)}, 0)},
        ["x", "x", "y", "y"],
    )
    rings = [setup.rings(rank) for rank in range(4)]
    assert [len(one.tensor) for one in rings] == [2, 2, 2, 2]
    assert not any(one.previous or one.next for one in rings)
    assert setup.rendezvous(1) == Rendezvous(["a", "a"], "x", 4711)
    assert setup.rendezvous(2) == Rendezvous(["b", "b"], "x", 4711)
    assert [type(setup.steps(rank)) for rank in range(4)] == [StepRings, StepRings, StepsUrl, StepsUrl]
    assert [setup.steps(rank).answers for rank in (0, 1)] == [None, None], "rank 2 answers, by its socket"
    assert [setup.local_ranks(rank) for rank in (1, 2)] == [[0, 1], [2, 3]]
    assert setup.tp_groups_across_hosts == []


def test_a_tensor_group_over_hosts(endpoint: Endpoint) -> None:
    setup = RankSetup(ParallelLayout(5, 1), ["a", "a", "b", "b", "c"], "a", 1000, endpoint)
    assert setup.tp_groups_across_hosts == [range(5)]
    assert [request.ranks for request in setup.requests().values()] == [[], [2, 3], [4]]
    assert len(setup.rings(0).tensor) == 2
    there = HostSetup(ParallelLayout(5, 1), [4], 1000)
    assert there.rings(4).tensor == []


def test_stages_that_lie_on_two_hosts(endpoint: Endpoint) -> None:
    """Three hosts with two ranks each, in groups of three: the middle host has shared memory, but no link."""
    setup = RankSetup(ParallelLayout(3, 2), ["a", "a", "b", "b", "c", "c"], "a", 1000, endpoint)
    assert setup.tp_groups_across_hosts == [range(3), range(3, 6)]
    middle = HostSetup(ParallelLayout(3, 2), [2, 3], 1000)
    assert middle.rings(2) == middle.rings(3) == RankRings([], None, None)
    assert len(setup.rings(1).tensor) == 2 and setup.rings(1).next is None


def test_an_engine_without_ranks_of_its_own(endpoint: Endpoint) -> None:
    setup = RankSetup(ParallelLayout(2, 1), ["b", "b"], "a", 1000, endpoint)
    assert setup.requests() == {0: SetupChannels(2, 1, [0, 1], 1000, False)}
    assert setup.rendezvous(0) is None and not setup.needs_store
    assert all(isinstance(setup.steps(rank), StepsUrl) for rank in (0, 1))
    setup.step_channel()
    setup.close()
