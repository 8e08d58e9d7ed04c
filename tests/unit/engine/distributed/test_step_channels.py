"""The step channel over rings, over sockets, and over both together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve_llm.common.curve_zmq import Endpoint
from serve_llm.common.errors import EngineError
from serve_llm.engine.distributed.step_channels import (
    MultiHostStepChannel,
    ShmStepChannel,
    ShmStepReceiver,
    SocketStepChannel,
    SocketStepReceiver,
)
from serve_llm.engine.parallel.shm import ChannelClosed
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer

LIMIT = 120.0


def serve(source: ShmStepReceiver, answers: bool) -> list[bytes]:
    taken = []
    try:
        while True:
            taken.append(source.receive())
            if answers:
                source.answer(taken[-1][::-1])
    except ChannelClosed:
        return taken


def test_all_ranks_read_each_step_and_one_answers() -> None:
    steps, answers = ShmRingBuffer.create(2, 256), ShmRingBuffer.create(1, 256)
    channel = ShmStepChannel(steps, answers)
    messages = [b"a", b"bc" * 1000, b"", b"d" * 300]
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(serve, ShmStepReceiver(steps, i, answers if i else None), bool(i)) for i in range(2)]
        for message in messages:
            channel.send(message)
            assert channel.receive() == message[::-1]
        channel.close()
        assert [rank.result(LIMIT) for rank in ranks] == [messages, messages]
    with pytest.raises(ChannelClosed):
        channel.receive()


def test_large_steps_and_large_answers_do_not_wait_for_each_other() -> None:
    """A rank takes no second step until its first answer, which does not fit into the ring, has been sent."""
    steps, answers = ShmRingBuffer.create(1, 64), ShmRingBuffer.create(1, 64)
    channel = ShmStepChannel(steps, answers)
    messages = [bytes([number]) * 5000 for number in range(4)]
    with ThreadPoolExecutor(1) as pool:
        rank = pool.submit(serve, ShmStepReceiver(steps, 0, answers), True)
        for message in messages:
            channel.send(message)
        assert [channel.receive() for _ in messages] == messages
        channel.close()
        assert rank.result(LIMIT) == messages


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint("127.0.0.1", "secret")
    yield made
    made.close()


def serve_remote(url: str, rank: int, answers: bool, count: int) -> list[bytes]:
    """Serve this many steps as a rank on another host, which its launcher would end."""
    source = SocketStepReceiver(url, "secret", rank)
    taken = []
    for _ in range(count):
        taken.append(source.receive())
        if answers:
            source.answer(taken[-1][::-1])
    source._socket.close()
    return taken


@pytest.mark.parametrize("answers_here", [True, False])
def test_ranks_on_other_hosts_get_the_same_steps_in_order(endpoint: Endpoint, answers_here: bool) -> None:
    steps, answers = ShmRingBuffer.create(1, 256), ShmRingBuffer.create(1, 256)
    remote = SocketStepChannel(endpoint, [1, 2])
    channel = MultiHostStepChannel(ShmStepChannel(steps, answers), remote, answers_here)
    messages = [b"a", b"", b"bc" * 1000, bytes(5_000_000), b"d"]
    with ThreadPoolExecutor(3) as pool:
        here = pool.submit(serve, ShmStepReceiver(steps, 0, answers), answers_here)
        there = [
            pool.submit(serve_remote, remote.url, rank, rank == 2 and not answers_here, len(messages))
            for rank in (1, 2)
        ]
        remote.connect(LIMIT)
        for message in messages:
            channel.send(message)
        assert [channel.receive() for _ in messages] == [message[::-1] for message in messages]
        assert [rank.result(LIMIT) for rank in there] == [messages, messages]
        channel.close()
        assert here.result(LIMIT) == messages
    with pytest.raises(ChannelClosed):
        channel.send(b"too late")
    with pytest.raises(ChannelClosed):
        channel.receive()


def test_ranks_on_other_hosts_may_get_another_message(endpoint: Endpoint) -> None:
    steps, answers = ShmRingBuffer.create(1, 256), ShmRingBuffer.create(1, 256)
    remote = SocketStepChannel(endpoint, [1])
    channel = MultiHostStepChannel(ShmStepChannel(steps, answers), remote, answers_here=True)
    with ThreadPoolExecutor(2) as pool:
        here = pool.submit(serve, ShmStepReceiver(steps, 0, answers), True)
        there = pool.submit(serve_remote, remote.url, 1, False, 2)
        remote.connect(LIMIT)
        channel.send(b"a", remote_message=b"with files")
        channel.send(b"b")
        assert [channel.receive(), channel.receive()] == [b"a", b"b"]
        assert there.result(LIMIT) == [b"with files", b"b"]
        channel.close()
        assert here.result(LIMIT) == [b"a", b"b"]


def test_no_rank_need_be_on_the_engines_host(endpoint: Endpoint) -> None:
    remote = SocketStepChannel(endpoint, [0])
    channel = MultiHostStepChannel(None, remote, False)
    with ThreadPoolExecutor(1) as pool:
        rank = pool.submit(serve_remote, remote.url, 0, True, 1)
        remote.connect(LIMIT)
        channel.send(b"abc")
        assert channel.receive() == b"cba" and rank.result(LIMIT) == [b"abc"]


def test_a_closed_channel_ends_the_wait_of_another_thread(endpoint: Endpoint) -> None:
    channel = MultiHostStepChannel(None, SocketStepChannel(endpoint, []), False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(channel.receive)
        channel.close()
        with pytest.raises(ChannelClosed):
            waiting.result(LIMIT)


def test_ranks_that_open_no_channel_are_named(endpoint: Endpoint) -> None:
    remote = SocketStepChannel(endpoint, [3, 5])
    source = SocketStepReceiver(remote.url, "secret", 5)
    with pytest.raises(EngineError, match=r"rank 3 did not open"):
        while True:  # until the message of rank 5 has arrived
            try:
                remote.connect(0.2)
            except EngineError as error:
                if "[3, 5]" not in str(error):
                    raise
    source._socket.close()
