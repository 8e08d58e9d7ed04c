"""Nodes that join node 0 on the loopback interface, and nodes that node 0 refuses."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from serve_llm.cli.check import rendezvous
from serve_llm.cli.check.host import inspect_host
from serve_llm.cli.check.rendezvous import CheckJoinRequest, CheckRendezvous, join
from serve_llm.common.curve_zmq import CurveClient, Endpoint, format_url, send
from serve_llm.common.errors import EngineError, OptionError


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


def request(rank: int, nnodes: int = 3) -> CheckJoinRequest:
    return CheckJoinRequest(nnodes, inspect_host(rank, "127.0.0.1", 1, None))


def test_nodes_join_before_and_after_node_0_starts() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(join, "127.0.0.1", port, request(2), 20)
        with CheckRendezvous("127.0.0.1", port, 3, 20) as group:
            late = pool.submit(join, "127.0.0.1", port, request(1), 20)
            assert group.wait() == {}
            lines = {1: late.result()[0], 2: early.result()[0]}
            assert late.result()[1] == early.result()[1] == 20
            for rank, line in lines.items():
                with closing(line):
                    assert group.reports[rank].rank == rank
                    group.send(rank, b"something")
                    assert line.receive(10) == b"something"
                    line.send(b"answer %d" % rank)
                    assert group.collect([rank], 10) == {rank: b"answer %d" % rank}
            assert group.lost == {}


def test_segments_are_small() -> None:
    with CheckRendezvous("127.0.0.1", 0, 2, 20) as group, socket.create_connection(("127.0.0.1", group.port)) as peer:
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= rendezvous.SEGMENT_BYTES


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (request(1), "--node-rank 1 is taken by"),
        (request(2, nnodes=4), "node 0 expects --nnodes 3, node 2 has --nnodes 4"),
        (request(0), "--node-rank 0 is not one of 1 to 2"),
        (request(3), "--node-rank 3 is not one of 1 to 2"),
    ],
)
def test_nodes_that_are_refused(wrong: CheckJoinRequest, message: str) -> None:
    with CheckRendezvous("127.0.0.1", port := free_port(), 3, 20) as group, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group.wait)
        with closing(join("127.0.0.1", port, request(1), 20)[0]):
            with pytest.raises(OptionError, match=message):
                join("127.0.0.1", port, wrong, 20)
            with closing(join("127.0.0.1", port, request(2), 20)[0]):
                assert waiting.result(20) == {} and sorted(group.reports) == [1, 2]


def test_strangers_are_ignored() -> None:
    with CheckRendezvous("127.0.0.1", port := free_port(), 2, 20) as group, ThreadPoolExecutor(1) as pool:
        with socket.create_connection(("127.0.0.1", port)) as browser:
            browser.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            node = pool.submit(join, "127.0.0.1", port, request(1, 2), 20)
            assert group.wait() == {}
            node.result()[0].close()


def test_a_node_of_another_version_is_refused() -> None:
    with CheckRendezvous("127.0.0.1", port := free_port(), 2, 20) as group, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group.wait)
        with closing(CurveClient(format_url("127.0.0.1", port), "")) as line:
            line.send(b'{"nnodes": 2}')
            assert b"is it the same version of serve-llm" in (line.receive(20) or b"")
        with closing(join("127.0.0.1", port, request(1, 2), 20)[0]):
            assert waiting.result(20) == {}


def test_a_node_0_of_another_version_is_reported() -> None:
    port = free_port()
    with closing(Endpoint("127.0.0.1", "")) as endpoint, ThreadPoolExecutor(1) as pool:
        listener, _ = endpoint.listen(port)
        joining = pool.submit(join, "127.0.0.1", port, request(1, 2), 20)
        peer, _ = listener.recv_multipart()
        send(listener, peer, b'{"seconds": "soon"}')
        with pytest.raises(EngineError, match="another version of serve-llm"):
            joining.result(20)


def test_absent_nodes_are_named() -> None:
    with CheckRendezvous("127.0.0.1", free_port(), 3, 0.05) as group:
        absent = group.wait()
    assert sorted(absent) == [1, 2]
    assert absent[2].startswith("node 2 has not arrived within 0.05 s and nothing is heard from it")


def test_no_node_0() -> None:
    with pytest.raises(EngineError, match="nothing listens on the port; start node 0"):
        join("127.0.0.1", free_port(), request(1), 0.05)


def test_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OptionError, match="Address already in use"):
        CheckRendezvous("127.0.0.1", taken.getsockname()[1], 2, 1)


def test_silent_and_ended_nodes_are_named() -> None:
    with CheckRendezvous("127.0.0.1", port := free_port(), 3, 20) as group, ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(join, "127.0.0.1", port, request(rank), 20) for rank in (1, 2)]
        assert group.wait() == {}
        silent, ended = (future.result()[0] for future in joining)
        with closing(silent):
            assert group.collect([1], 0.05) == {}
            name = group.reports[1].name
            assert group.lost == {1: f"node 1 ({name}) has been silent for 0.05 s"}
            ended.close()
            assert group.collect([2], 20) == {}
            assert group.lost[2] == f"node 2 ({name}) has ended"


def test_node_0_that_ends_is_reported() -> None:
    group = CheckRendezvous("127.0.0.1", port := free_port(), 2, 20)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join, "127.0.0.1", port, request(1, 2), 20)
        assert group.wait() == {}
        line, _ = joining.result()
        group.close()
        with closing(line), pytest.raises(EngineError, match="is lost"):
            line.receive(20)
