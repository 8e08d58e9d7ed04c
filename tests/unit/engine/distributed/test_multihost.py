"""Node 0 against nodes by script, and a follower against a node 0 by script, over the real connection; no ranks run."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from serve_llm.common.curve_zmq import CurveClient, Endpoint, send
from serve_llm.common.errors import CapacityError, EngineError, ModelError, OptionError, ServeError
from serve_llm.common.messages import Failed
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import make_options
from serve_llm.engine.distributed.multihost import follower as follower_module
from serve_llm.engine.distributed.multihost import leader as nodes_module
from serve_llm.engine.distributed.multihost import messages
from serve_llm.engine.distributed.multihost.follower import Follower, Stopped
from serve_llm.engine.distributed.multihost.leader import MultiHostLeader, listening_address
from serve_llm.engine.distributed.multihost.messages import (
    EndNode,
    EngineServing,
    JoinRefused,
    JoinRequest,
    NodeReport,
    RankStatus,
    RunRanks,
)

LIMIT = 60.0


class NoRanks:
    """Instead of `LocalRanks`."""

    def __init__(self, ranks: Sequence[int], url: str, **_: object) -> None:
        self.ranks, self.gone = ranks, {}
        self.ends = 0

    def ended(self) -> dict[int, str]:
        return dict(self.gone)

    def where(self, rank: int) -> str:
        return f"host h, pid {100 + rank}"

    def state(self, rank: int) -> str:
        return "waiting"

    def pid(self, rank: int) -> int:
        return 100 + rank

    def serve(self) -> None:
        pass

    def end(self, cause: str = "") -> None:
        self.ends += 1


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nodes_module, follower_module):
        monkeypatch.setattr(module, "WorkerLauncher", NoRanks)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def options_of(master: int, **more: object) -> Options:
    """master: port of node 0."""
    network = {"nnodes": 3, "master_addr": f"127.0.0.1:{master}", "cluster_secret": "s", "device": "cpu"}
    return make_options("demo", tensor_parallel_size=5, **(network | more))


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Master:
    """`MultiHostLeader`, and how to reach it."""

    def __init__(self, *, replaces: bool = False, **options: object) -> None:
        self.endpoint = Endpoint("127.0.0.1", "s")
        self.port = free_port()
        self.nodes = MultiHostLeader(
            options_of(self.port, **options), self.endpoint, self.port, "tcp://127.0.0.1:1", replaces=replaces
        )
        self.lines: list[CurveClient] = []

    def line(self) -> CurveClient:
        self.lines.append(CurveClient(f"tcp://127.0.0.1:{self.port}", "s"))
        return self.lines[-1]

    def join(self, node: int, nnodes: int = 3) -> tuple[CurveClient, messages.ToNode]:
        line = self.line()
        line.send(messages.encode(JoinRequest(node, nnodes, f"h{node}", f"10.0.0.{node}")))
        return line, hear(line)

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
    assert [master.nodes.where(rank) for rank in (1, 3, 4)] == [
        "node 0, host h, pid 101",
        "node 1, host h1 at 10.0.0.1",
        "node 2, host h2 at 10.0.0.2",
    ]


def test_what_a_node_reports(master: Master) -> None:
    line, _ = master.join(1)
    nodes = master.nodes
    assert nodes.state(2) == "" and nodes.where(4) == "node 2, which has not joined"
    line.send(messages.encode(NodeReport({2: RankStatus(7, "stopped", ""), 3: RankStatus(8, "", "signal SIGKILL")})))
    until(nodes.ended)
    assert nodes.ended() == {3: "signal SIGKILL"} and nodes.state(2) == "stopped" and nodes.state(0) == "waiting"
    assert nodes.where(2) == "node 1, host h1 at 10.0.0.1, pid 7"
    line.send(messages.encode(Failed("ModelError", "there is no directory m")))
    until(lambda: 2 in nodes.ended())
    error = nodes.ended()[2]
    assert isinstance(error, ModelError) and str(error) == "node 1, host h1 at 10.0.0.1: there is no directory m"


def test_who_is_refused_and_that_it_disturbs_nobody(master: Master) -> None:
    first, _ = master.join(1)
    for node, nnodes, why in (
        (1, 3, "--node-rank 1 is taken by node 1, host h1 at 10.0.0.1"),
        (2, 2, "node 0 has --nnodes 3, node 2 has --nnodes 2"),
        (3, 3, "--node-rank 3 is none of 1 to 2"),
        (0, 3, "--node-rank 0 is none of 1 to 2"),
    ):
        line, answer = master.join(node, nnodes)
        assert answer == JoinRefused(why)
        line.send(messages.encode(Failed("EngineError", "from somebody who is no node")))
    stranger = master.line()
    stranger.send(b"GET / HTTP/1.1")
    assert isinstance(answer := hear(stranger), JoinRefused) and "does not understand" in answer.reason
    first.send(messages.encode(NodeReport({2: RankStatus(7, "running", ""), 3: RankStatus(8, "running", "")})))
    until(lambda: master.nodes.state(3) == "running")
    assert not master.nodes.ended()


def test_a_node_that_is_lost(master: Master) -> None:
    line, _ = master.join(1)
    assert not master.nodes.ended()
    line.close()
    until(master.nodes.ended)
    assert master.nodes.ended().keys() == {2, 3}
    assert "loss of its node" in str(master.nodes.ended()[2])


def test_nodes_that_do_not_come_are_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "JOIN_SECONDS", 0.5)
    master = Master()
    try:
        until(lambda: len(master.nodes.ended()) == 3)
        error = master.nodes.ended()[4]
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


class Following:
    """A follower in a thread, and the test as its node 0."""

    def __init__(self, **options: object) -> None:
        self.endpoint = Endpoint("127.0.0.1", "s")
        self.socket, url = self.endpoint.listen()
        port = int(url.rpartition(":")[2])
        self.follower = Follower(options_of(port, node_rank=1, **options))
        self.result: int | BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.joined = self.await_join()

    def _run(self) -> None:
        try:
            self.result = self.follower.run()
        except (ServeError, Stopped) as error:
            self.result = error

    def await_join(self) -> JoinRequest:
        while True:
            assert self.socket.poll(LIMIT * 1000)
            self.peer, frame = self.socket.recv_multipart()
            if isinstance(message := messages.decode_from_node(frame), JoinRequest):
                return message

    def say(self, message: messages.ToNode) -> None:
        assert send(self.socket, self.peer, messages.encode(message))

    def hear(self) -> messages.FromNode:
        assert self.socket.poll(LIMIT * 1000)
        return messages.decode_from_node(self.socket.recv_multipart()[1])

    def run(self, **options: object) -> None:
        self.say(RunRanks([2, 3], False, options_of(1, **options), "tcp://127.0.0.1:1"))

    def end(self) -> int | BaseException | None:
        self._thread.join(LIMIT)
        return self.result


@pytest.fixture
def following() -> Iterator[Following]:
    made = Following()
    yield made
    made.endpoint.close()
    made.end()


def test_a_follower_from_join_to_end(following: Following) -> None:
    assert following.joined == JoinRequest(1, 3, socket.gethostname(), "127.0.0.1")
    following.run(master_addr=following.follower._master)
    assert following.hear() == NodeReport({rank: RankStatus(100 + rank, "waiting", "") for rank in (2, 3)})
    ranks = following.follower._ranks
    assert isinstance(ranks, NoRanks)
    ranks.gone[3] = "signal SIGSEGV"
    until(
        lambda: (
            following.hear()
            == NodeReport({2: RankStatus(102, "waiting", ""), 3: RankStatus(103, "waiting", "signal SIGSEGV")})
        )
    )
    following.say(EndNode("rank 3 died"))
    error = following.end()
    assert isinstance(error, EngineError) and str(error) == "Node 0 ends: rank 3 died" and ranks.ends == 1


def test_a_follower_joins_again_once_an_engine_has_served(
    following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "BEAT_SECONDS", 0.0)
    address = following.follower._master
    following.run(master_addr=address)
    following.say(EngineServing())
    for cause in ("rank 3 died", "another node is lost while starting"):
        following.say(EndNode(cause))
        following.await_join()
        following.run(master_addr=address)
    following.say(EndNode(""))
    assert following.end() == 0


def test_a_follower_that_is_told_of_an_orderly_end(following: Following) -> None:
    following.run(master_addr=following.follower._master)
    following.say(EndNode(""))
    assert following.end() == 0


def test_a_follower_without_the_model_says_so(following: Following, tmp_path: Path) -> None:
    options = replace(following.follower._options, model=str(tmp_path / "none"), node_rank=0)
    following.follower._options = replace(options, model="", node_rank=1)
    following.say(RunRanks([2], False, messages.without_secrets(options), "tcp://127.0.0.1:1"))
    said = following.hear()
    assert isinstance(said, Failed) and said.kind == "ModelError"
    assert said.message.startswith(f"there is no directory {tmp_path / 'none'}: ")
    assert isinstance(following.end(), ModelError)


def test_a_follower_with_too_few_gpus_says_so(following: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "list_gpus", lambda _: ["0"])
    following.say(RunRanks([2, 3], True, options_of(1, master_addr=following.follower._master), "tcp://127.0.0.1:1"))
    assert following.hear() == Failed("CapacityError", "2 ranks on this host need as many GPUs; it has 1")
    assert isinstance(following.end(), CapacityError)


def test_a_follower_whose_node_0_is_gone(following: Following) -> None:
    following.run(master_addr=following.follower._master)
    following.hear()
    following.endpoint.close()
    error = following.end()
    assert isinstance(error, EngineError) and str(error).startswith("node 0 is lost: the connection to 127.0.0.1:")


def test_a_refused_follower_says_why(following: Following) -> None:
    following.say(JoinRefused("--node-rank 1 is taken by node 1"))
    error = following.end()
    assert isinstance(error, OptionError) and str(error) == "node 0 refuses this node: --node-rank 1 is taken by node 1"


def test_a_follower_that_waits_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "MASTER_SECONDS", 0.3)
    lonely = Follower(options_of(free_port(), node_rank=2))
    with pytest.raises(
        EngineError, match=r"after 0 s node 0 at 127\.0\.0\.1:\d+ still cannot be reached: is it running"
    ):
        lonely.run()


def test_a_follower_waits_for_the_name_of_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "NAME_SECONDS", 0.1)
    asked: list[str] = []

    def unknown(name: str, *_: object, **__: object) -> None:
        asked.append(name)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(follower_module.socket, "getaddrinfo", unknown)
    lonely = Follower(options_of(1, node_rank=2, master_addr="node-0.example:29500"))
    with pytest.raises(OptionError, match=r"^--master-addr node-0\.example: Name or service not known on \S+ for 0 s"):
        lonely.run()
    assert len(asked) >= 2
