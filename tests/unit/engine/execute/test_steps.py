"""The step channel over rings, and the wiring of a host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from serve_llm.engine.execute.control import Rings, encode
from serve_llm.engine.execute.steps import RingSource, RingSteps
from serve_llm.engine.execute.wiring import HostWiring
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.parallel.ring import Ring
from serve_llm.engine.parallel.shm import Closed

LIMIT = 120.0


def serve(source: RingSource, answers: bool) -> list[bytes]:
    taken = []
    try:
        while True:
            taken.append(source.receive())
            if answers:
                source.answer(taken[-1][::-1])
    except Closed:
        return taken


def test_all_ranks_read_each_step_and_one_answers() -> None:
    steps, answers = Ring.create(2, 256), Ring.create(1, 256)
    channel = RingSteps(steps, answers)
    messages = [b"a", b"bc" * 1000, b"", b"d" * 300]
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(serve, RingSource(steps, i, answers if i else None), bool(i)) for i in range(2)]
        for message in messages:
            channel.send(message)
            assert channel.receive() == message[::-1]
        channel.close()
        assert [rank.result(LIMIT) for rank in ranks] == [messages, messages]
    with pytest.raises(Closed):
        channel.receive()


def test_large_steps_and_large_answers_do_not_wait_for_each_other() -> None:
    """A rank takes no second step before it is rid of its first answer, which does not fit into the ring."""
    steps, answers = Ring.create(1, 64), Ring.create(1, 64)
    channel = RingSteps(steps, answers)
    messages = [bytes([number]) * 5000 for number in range(4)]
    with ThreadPoolExecutor(1) as pool:
        rank = pool.submit(serve, RingSource(steps, 0, answers), True)
        for message in messages:
            channel.send(message)
        assert [channel.receive() for _ in messages] == messages
        channel.close()
        assert rank.result(LIMIT) == messages


def test_wiring_of_two_stages_of_two() -> None:
    wiring = HostWiring(Grid(2, 2), range(4), step_bytes=1000)
    rings = [wiring.rings(rank) for rank in range(4)]
    assert [one.reader for one in rings] == [0, 1, 2, 3]
    assert len({one.steps for one in rings}) == 1
    assert [one.answers is not None for one in rings] == [False, False, True, False]
    assert rings[0].tensor == rings[1].tensor != rings[2].tensor == rings[3].tensor
    assert [one.previous for one in rings] == [None, None, rings[0].next, rings[1].next]
    assert rings[2].next is rings[3].next is None and rings[0].next != rings[1].next
    assert len(encode(rings)) < 1000


def test_one_rank_alone_needs_steps_only() -> None:
    wiring = HostWiring(Grid(), range(1), step_bytes=1)
    handles = wiring.steps.memory.handle, wiring.answers.memory.handle
    assert wiring.rings(0) == Rings(handles[0], 0, handles[1], [], None, None)


def test_closing_the_wiring_closes_every_ring() -> None:
    wiring = HostWiring(Grid(2, 2), range(4), step_bytes=1)
    handles = {wiring.rings(rank).next or wiring.rings(rank).previous for rank in range(4)}
    handles |= {handle for rank in range(4) for handle in wiring.rings(rank).tensor}
    handles |= {wiring.steps.memory.handle, wiring.answers.memory.handle}
    assert len(handles) == 2 + 4 + 2
    assert not any(Ring.open(handle).memory.closed for handle in handles)
    wiring.close()
    assert all(Ring.open(handle).memory.closed for handle in handles)
