"""A follower against a scripted node 0, over the real connection; no ranks run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from serve_llm.common.curve_zmq import Endpoint, send
from serve_llm.common.errors import CapacityError, EngineError, ModelError, OptionError, ServeError
from serve_llm.common.messages import Failed
from serve_llm.engine.distributed.multihost import follower as follower_module
from serve_llm.engine.distributed.multihost import messages
from serve_llm.engine.distributed.multihost import session as session_module
from serve_llm.engine.distributed.multihost.follower import Follower
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
from serve_llm.engine.distributed.multihost.session import Stopped
from support.node_messages import LIMIT, NoRanks, options_of, until
from support.nodes import free_port


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "WorkerLauncher", NoRanks)


class Following:
    """A follower in a thread; the test acts as its node 0."""

    def __init__(self, engines: Sequence[int] = (0,)) -> None:
        """engines: those with ranks on this node. The test listens for each of them, and acts as the first."""
        self.endpoint = Endpoint("127.0.0.1", "s")
        listeners = [self.endpoint.listen() for _ in engines]
        self.sockets = [listener for listener, _ in listeners]
        self.socket = self.sockets[0]
        ports = [int(url.rpartition(":")[2]) for _, url in listeners]
        self.follower = Follower(options_of(ports[0], node_rank=1))
        self.result: int | BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.found = self.await_message(FindEngines)
        self.say(NodeEngines(dict(zip(engines, ports, strict=True))))
        self.joined = self.await_message(JoinRequest)

    def _run(self) -> None:
        try:
            self.result = self.follower.run()
        except (ServeError, Stopped) as error:
            self.result = error

    def await_message(self, kind: type[messages.FromNode]) -> messages.FromNode:
        """Wait for a message. Answers go to its sender."""
        while True:
            assert self.socket.poll(LIMIT * 1000)
            self.peer, frame = self.socket.recv_multipart()
            if isinstance(message := messages.decode_from_node(frame), kind):
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
    here = (socket.gethostname(), "127.0.0.1")
    assert (following.found, following.joined) == (FindEngines(1, 3, *here), JoinRequest(0, 1, *here))
    following.run(master_addr=following.follower._master)
    assert following.hear() == NodeReport({rank: RankStatus(100 + rank, "waiting", "") for rank in (2, 3)})
    (session,) = following.follower._sessions
    ranks = session._ranks
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
    monkeypatch.setattr(session_module, "BEAT_SECONDS", 0.0)
    address = following.follower._master
    following.run(master_addr=address)
    following.say(EngineServing())
    for cause in ("rank 3 died", "another node is lost while starting"):
        following.say(EndNode(cause))
        following.await_message(JoinRequest)
        following.run(master_addr=address)
    following.say(EndNode(""))
    assert following.end() == 0


def test_a_follower_in_two_engines_of_which_one_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "BEAT_SECONDS", 0.0)
    following = Following(engines=[4, 5])
    shape = {"master_addr": following.follower._master, "data_parallel_size": 6}
    try:
        assert following.joined == JoinRequest(4, 1, socket.gethostname(), "127.0.0.1")
        following.run(**shape)
        following.say(EngineServing())
        following.say(EndNode("rank 3 died"))
        following.await_message(JoinRequest)
        following.run(**shape)
        first, following.socket = following.peer, following.sockets[1]
        assert following.await_message(JoinRequest) == JoinRequest(5, 1, socket.gethostname(), "127.0.0.1")
        following.run(**shape)
        until(lambda: all(session.has_ranks for session in following.follower._sessions))
        for listener, peer in zip(following.sockets, (first, following.peer), strict=True):
            following.socket, following.peer = listener, peer
            following.say(EndNode(""))
        assert following.end() == 0
    finally:
        following.endpoint.close()


def test_a_follower_that_is_told_of_an_orderly_end(following: Following) -> None:
    following.run(master_addr=following.follower._master)
    following.say(EndNode(""))
    assert following.end() == 0


def test_a_follower_without_the_model_says_so(following: Following, tmp_path: Path) -> None:
    (session,) = following.follower._sessions
    options = replace(session._options, model=str(tmp_path / "none"), node_rank=0)
    session._options = replace(options, model="", node_rank=1)
    following.say(RunRanks([2], False, messages.without_secrets(options), "tcp://127.0.0.1:1"))
    said = following.hear()
    assert isinstance(said, Failed) and said.kind == "ModelError"
    assert said.message.startswith(f"there is no directory {tmp_path / 'none'}: ")
    assert isinstance(following.end(), ModelError)


def test_a_follower_with_too_few_gpus_says_so(following: Following, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "list_gpus", lambda _: ["0"])
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
        EngineError, match=r"after 0 s node 0 at 127\.0\.0\.1:\d+ still cannot be reached; is it running"
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
