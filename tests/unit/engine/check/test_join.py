"""Nodes that arrive at a master on the loopback interface, and those who may not."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from serve_llm.engine.check.host import examine
from serve_llm.engine.check.join import Answer, Arrival, Channel, Gathering, join
from serve_llm.engine.errors import EngineError, OptionError


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def arrival(rank: int, nnodes: int = 3) -> Arrival:
    return Arrival(nnodes, examine(rank, "127.0.0.1", 1, None))


def test_nodes_come_before_and_after_the_master() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(join, "127.0.0.1", port, arrival(2), 20)
        with Gathering("127.0.0.1", port, 3, 20) as gathering:
            late = pool.submit(join, "127.0.0.1", port, arrival(1), 20)
            assert gathering.wait() == {}
            for rank, future in ((1, late), (2, early)):
                report, channel = gathering.nodes[rank]
                assert report.rank == rank
                channel.send(Answer("something"))
                node, waiting = future.result()
                assert waiting == 20
                with closing(node):
                    assert node.receive(Answer, 10) == Answer("something")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (arrival(1), "--node-rank 1 is taken by"),
        (arrival(2, nnodes=4), "node 0 expects --nnodes 3, node 2 has --nnodes 4"),
        (arrival(0), "--node-rank 0 is not one of 1 to 2"),
        (arrival(3), "--node-rank 3 is not one of 1 to 2"),
    ],
)
def test_nodes_that_are_refused(wrong: Arrival, message: str) -> None:
    with Gathering("127.0.0.1", port := free_port(), 3, 20) as gathering, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gathering.wait)
        with closing(join("127.0.0.1", port, arrival(1), 20)[0]):
            with pytest.raises(OptionError, match=message):
                join("127.0.0.1", port, wrong, 20)
            with closing(join("127.0.0.1", port, arrival(2), 20)[0]):
                assert waiting.result(20) == {} and sorted(gathering.nodes) == [1, 2]


def test_strangers_are_ignored() -> None:
    with Gathering("127.0.0.1", port := free_port(), 2, 20) as gathering, ThreadPoolExecutor(1) as pool:
        with socket.create_connection(("127.0.0.1", port)) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            node = pool.submit(join, "127.0.0.1", port, arrival(1, 2), 20)
            assert gathering.wait() == {}
            node.result()[0].close()


def test_who_is_not_there() -> None:
    with Gathering("127.0.0.1", free_port(), 3, 0.05) as gathering:
        why = gathering.wait()
    assert sorted(why) == [1, 2]
    assert why[2].startswith("node 2 has not arrived within 0.05 s and nothing is heard from it")


def test_no_master() -> None:
    with pytest.raises(EngineError, match="nobody listens on the port; start node 0"):
        join("127.0.0.1", free_port(), arrival(1), 0.05)


def test_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OptionError, match="Address already in use"):
        Gathering("127.0.0.1", taken.getsockname()[1], 2, 1)


def test_channel_says_who_is_silent_or_gone() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, "node 7 (x)")
    with pytest.raises(EngineError, match=r"node 7 \(x\) is silent for 0.05 s"):
        channel.receive(Answer, 0.05)
    theirs.sendall(b'{"refused": 3}\n')
    with pytest.raises(EngineError, match="something else than this version"):
        channel.receive(Answer, 5)
    theirs.close()
    with pytest.raises(EngineError, match=r"node 7 \(x\) has ended"):
        channel.receive(Answer, 5)
    ours.close()
