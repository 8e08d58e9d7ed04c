"""Node 0 against scripted nodes, over the real connection; no ranks run."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest

from serve_llm.common.curve_zmq import CurveClient, Endpoint
from serve_llm.common.errors import EngineError, HostLost, ModelError, OptionError
from serve_llm.common.messages import Failed
from serve_llm.common.options.schema import Options
from serve_llm.engine.distributed.multihost import leader as nodes_module
from serve_llm.engine.distributed.multihost import messages
from serve_llm.engine.distributed.multihost.leader import MultiHostLeader, listening_address
from serve_llm.engine.distributed.multihost.messages import (
    EndNode,
    EngineServing,
    FindEngines,
    JoinRefused,
    JoinRequest,
    NodeEngines,
    NodeReport,
    RankStatus,
    RunRanks,
)
from support.node_messages import LIMIT, NoRanks, options_of, until
from support.nodes import free_port


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "WorkerLauncher", NoRanks)


class Master:
    """A `MultiHostLeader` and its address."""

    def __init__(self, *, engine: int = 0, replaces: bool = False, **options: object) -> None:
        """engine: the first one with ranks on other nodes."""
        self.endpoint = Endpoint("127.0.0.1", "s")
        self.port = free_port()
        self.engine = engine
        self.nodes = MultiHostLeader(
            options_of(self.port, **options), self.endpoint, self.port, "tcp://127.0.0.1:1", engine, replaces=replaces
        )
        self.lines: list[CurveClient] = []

    def line(self) -> CurveClient:
        self.lines.append(CurveClient(f"tcp://127.0.0.1:{self.port}", "s"))
        return self.lines[-1]

    def join(self, node: int) -> tuple[CurveClient, messages.ToNode]:
        line = self.line()
        line.send(messages.encode(JoinRequest(self.engine, node, f"h{node}", f"10.0.0.{node}")))
        return line, hear(line)

    def find(self, node: int, nnodes: int = 3) -> messages.ToNode:
        line = self.line()
        line.send(messages.encode(FindEngines(node, nnodes, f"h{node}", f"10.0.0.{node}")))
        return hear(line)

    def close(self) -> None:
        for line in self.lines:
            line.close()
        self.nodes.end()
        self.endpoint.close()


def hear(line: CurveClient) -> messages.ToNode:
    frame = line.receive(LIMIT)
    assert frame is not None
    return messages.decode_to_node(frame)


@pytest.fixture
def master() -> Iterator[Master]:
    made = Master()
    yield made
    made.close()


def test_ranks_are_spread_evenly_and_the_first_nodes_get_more(master: Master) -> None:
    _, second = master.join(2)
    _, first = master.join(1)
    assert isinstance(first, RunRanks) and isinstance(second, RunRanks)
    assert (first.ranks, second.ranks, first.url, first.on_gpus) == ([2, 3], [4], "tcp://127.0.0.1:1", False)
    assert first.options.model == "demo" and first.options.cluster_secret is None
    assert [master.nodes.describe_place(rank) for rank in (1, 3, 4)] == [
        "node 0, host h, pid 101",
        "node 1, host h1 at 10.0.0.1",
        "node 2, host h2 at 10.0.0.2",
    ]


def test_what_a_node_reports(master: Master) -> None:
    line, _ = master.join(1)
    nodes = master.nodes
    assert nodes.state(2) == "" and nodes.describe_place(4) == "node 2, which has not joined"
    line.send(messages.encode(NodeReport({2: RankStatus(7, "stopped", ""), 3: RankStatus(8, "", "signal SIGKILL")})))
    until(nodes.find_ended)
    assert nodes.find_ended() == {3: "signal SIGKILL"} and nodes.state(2) == "stopped" and nodes.state(0) == "waiting"
    assert nodes.describe_place(2) == "node 1, host h1 at 10.0.0.1, pid 7"
    line.send(messages.encode(Failed("ModelError", "there is no directory m")))
    until(lambda: 2 in nodes.find_ended())
    error = nodes.find_ended()[2]
    assert isinstance(error, ModelError) and str(error) == "node 1, host h1 at 10.0.0.1: there is no directory m"


def test_who_is_refused_and_that_it_disturbs_nobody(master: Master) -> None:
    first, _ = master.join(1)
    for node, nnodes, why in (
        (2, 2, "node 0 has --nnodes 3, node 2 has --nnodes 2"),
        (3, 3, "--node-rank 3 is not from 1 to 2"),
        (0, 3, "--node-rank 0 is not from 1 to 2"),
    ):
        assert master.find(node, nnodes) == JoinRefused(why)
    for node, why in (
        (1, "--node-rank 1 is taken by node 1, host h1 at 10.0.0.1"),
        (3, "node 0 was started again with other options, and node 3 no longer has ranks of this engine"),
    ):
        line, answer = master.join(node)
        assert answer == JoinRefused(why)
        line.send(messages.encode(Failed("EngineError", "from somebody who is no node")))
    stranger = master.line()
    stranger.send(b"GET / HTTP/1.1")
    assert isinstance(answer := hear(stranger), JoinRefused) and "does not understand" in answer.reason
    first.send(messages.encode(NodeReport({2: RankStatus(7, "running", ""), 3: RankStatus(8, "running", "")})))
    until(lambda: master.nodes.state(3) == "running")
    assert not master.nodes.find_ended()


def test_a_node_that_is_lost(master: Master) -> None:
    line, _ = master.join(1)
    assert not master.nodes.find_ended()
    line.close()
    until(master.nodes.find_ended)
    assert master.nodes.find_ended().keys() == {2, 3}
    error = master.nodes.find_ended()[2]
    assert isinstance(error, HostLost) and "loss of its node" in str(error)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_node_that_is_back_before_its_loss_is_known_goes_to_the_next_engine(replaces: bool) -> None:
    master = Master(replaces=replaces)
    try:
        line, _ = master.join(1)
        line.close()
        until(master.nodes.find_ended)
        line, said = master.join(1)
        if replaces:
            assert said == EngineServing()
            said = hear(line)
        assert said == EndNode("node 1, host h1 at 10.0.0.1 was lost")
    finally:
        master.close()


def test_nodes_are_told_which_engines_they_have() -> None:
    """Seven engines of two ranks: 0 and 1 on node 0, 2 to 5 on node 1, 6 on node 2."""
    shape = {"tensor_parallel_size": 2, "data_parallel_size": 7, "data_parallel_split": "2,4,1"}
    master = Master(engine=2, **shape)
    try:
        port = master.port
        assert master.find(1) == NodeEngines({2: port, 3: port + 1, 4: port + 2, 5: port + 3})
        assert master.find(2) == NodeEngines({6: port + 4})
        _, answer = master.join(1)
        assert isinstance(answer, RunRanks) and answer.ranks == [0, 1] and answer.options.data_parallel_size == 7
        _, refused = master.join(2)
        assert isinstance(refused, JoinRefused)
    finally:
        master.close()


def test_nodes_that_do_not_come_are_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "JOIN_SECONDS", 0.5)
    master = Master()
    try:
        until(lambda: len(master.nodes.find_ended()) == 3)
        error = master.nodes.find_ended()[4]
        assert isinstance(error, EngineError)
        assert re.search(
            r"^node 2 has not joined at 127\.0\.0\.1:\d+ within 0 s: start serve-llm --nnodes 3 --node-rank 2 "
            r"--master-addr 127\.0\.0\.1:\d+ there",
            str(error),
        )
    finally:
        master.close()


def test_all_are_told_the_end_and_why(master: Master) -> None:
    lines = [master.join(node)[0] for node in (1, 2)]
    ending = threading.Thread(target=master.nodes.end, args=("rank 3 died",))
    ending.start()
    for line in lines:
        assert hear(line) == EndNode("rank 3 died")
        line.close()
    ending.join(LIMIT)
    assert not ending.is_alive()


@pytest.mark.parametrize(
    ("replaces", "serves", "max_restarts", "are_told"),
    [(False, False, 10, False), (False, True, 10, True), (True, False, 10, True), (True, True, 0, False)],
)
def test_nodes_are_told_once_that_an_engine_is_replaced(
    replaces: bool, serves: bool, max_restarts: int, are_told: bool
) -> None:
    master = Master(replaces=replaces, max_restarts=max_restarts)
    try:
        line, _ = master.join(1)
        if serves:
            master.nodes.serve()
        ending = threading.Thread(target=master.nodes.end, args=("rank 3 died",))
        ending.start()
        said = [hear(line)]
        while said[-1] != EndNode("rank 3 died"):
            said.append(hear(line))
        assert said == [EngineServing(), EndNode("rank 3 died")][not are_told :]
        line.close()
        ending.join(LIMIT)
    finally:
        master.close()


def test_node_0_listens_on_its_own_address_only() -> None:
    assert listening_address(options_of(1)) == "127.0.0.1"
    with pytest.raises(OptionError, match=r"--host-ip 192\.0\.2\.1 is not an address of this host"):
        listening_address(options_of(1, host_ip="192.0.2.1"))
    with pytest.raises(OptionError, match=r"192\.0\.2\.1"):
        listening_address(options_of(1, master_addr="192.0.2.1:5"))


def test_what_is_said_on_a_follower_too_must_be_the_same() -> None:
    first = options_of(1, dtype="float32")
    for same in ({}, {"dtype": "float32"}, {"port": 1, "log_level": "debug", "download_dir": "/elsewhere"}):
        messages.check_options_match(options_of(1, node_rank=1, **same), first)
    unsaid = Options(model="", nnodes=3, node_rank=1, master_addr="127.0.0.1:1")
    messages.check_options_match(unsaid, first)
    with pytest.raises(OptionError, match=r"^node 1 was started with --dtype bfloat16, node 0 with float32$"):
        messages.check_options_match(options_of(1, node_rank=1, dtype="bfloat16"), first)
    with pytest.raises(OptionError, match=r"^node 1 was started with the model other, node 0 with demo$"):
        messages.check_options_match(Options(model="other", node_rank=1, nnodes=3, master_addr="127.0.0.1:1"), first)
