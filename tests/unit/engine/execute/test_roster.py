"""The roster against ranks by script: real sockets that speak `control`, and processes that are made up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from serve_llm.engine.errors import EngineError, ModelError, RankFailed, ServeError
from serve_llm.engine.execute import control
from serve_llm.engine.execute import roster as roster_module
from serve_llm.engine.execute.control import Allocate, Failed, Joined, Loaded
from serve_llm.engine.execute.roster import Roster
from serve_llm.engine.execute.threads import Threads
from serve_llm.engine.parallel.encrypted import Endpoint, Line

LIMIT = 60.0


class Ranks:
    """See `roster.Launched`: two ranks whose ends the test decides."""

    def __init__(self, address: str) -> None:
        self.gone: dict[int, str] = {}
        self.states = {0: "waiting", 1: "waiting"}
        self.sockets = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(2)]
        for socket in self.sockets:
            socket.linger = 0
            socket.connect(address)
        self.ends = 0
        self.address = address

    def say(self, rank: int, message: control.FromRank) -> None:
        self.sockets[rank].send(control.encode(message))

    def hear(self, rank: int) -> control.ToRank:
        return control.decode_to_rank(self.sockets[rank].recv())

    def ended(self) -> dict[int, str]:
        return dict(self.gone)

    def where(self, rank: int) -> str:
        return f"host h, pid {100 + rank}"

    def state(self, rank: int) -> str:
        return self.states[rank]

    def serve(self) -> None:
        pass

    def end(self, cause: str = "") -> None:
        self.ends += 1


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made: list[Ranks] = []

    def launch(address: str) -> Ranks:
        made.append(Ranks(address))
        return made[0]

    roster = Roster(2, launch)
    made[0].roster = roster
    yield made[0]
    roster.close()
    for socket in made[0].sockets:
        socket.close()


def hello(ranks: Ranks, *, through: tuple[control.FromRank, ...] = ()) -> Roster:
    """Both ranks have said Hello, and what is in `through`."""
    for rank in range(2):
        ranks.say(rank, control.hello(rank))
        for message in through:
            ranks.say(rank, message)
    ranks.roster.gather(control.Hello, LIMIT)
    return ranks.roster


def test_one_message_from_each_in_rank_order_also_when_some_are_ahead(ranks: Ranks) -> None:
    ranks.say(1, control.hello(1))
    ranks.say(1, Joined())
    ranks.say(1, Loaded(11, THREADS))  # before rank 0 has said anything
    ranks.say(0, control.hello(0))
    roster: Roster = ranks.roster
    assert [said.rank for said in roster.gather(control.Hello, LIMIT)] == [0, 1]
    ranks.say(0, Joined())
    ranks.say(0, Loaded(10, THREADS))
    assert roster.gather(Joined, LIMIT) == [Joined(), Joined()]
    assert [said.num_blocks for said in roster.gather(Loaded, LIMIT)] == [10, 11]
    for rank in range(2):
        roster.send(rank, Allocate(10 + rank))
        assert ranks.hear(rank) == Allocate(10 + rank)


def test_once_all_are_connected_the_socket_has_no_name(ranks: Ranks) -> None:
    path = Path(ranks.address.removeprefix("ipc://"))
    assert path.exists()
    hello(ranks)
    assert not path.exists() and not path.parent.exists()
    ranks.say(0, Joined())
    ranks.say(1, Joined())
    ranks.roster.gather(Joined, LIMIT)


def test_who_has_not_arrived_is_named(ranks: Ranks) -> None:
    ranks.say(1, control.hello(1))
    with pytest.raises(EngineError, match=r"after 0 s still starting: rank 0 \(host h, pid 100\)$"):
        ranks.roster.gather(control.Hello, 0.3)
    ranks.say(0, control.hello(0))
    ranks.say(0, Joined())
    ranks.roster.gather(control.Hello, LIMIT)
    with pytest.raises(EngineError, match=r"still joining the others: rank 1 \(host h, pid 101\)$"):
        ranks.roster.gather(Joined, 0.3)


def test_our_own_errors_keep_their_class_and_name_the_rank(ranks: Ranks) -> None:
    roster = hello(ranks, through=(Joined(),))
    ranks.say(1, Failed("while loading weights", "ModelError", "the checkpoint lacks x"))
    with pytest.raises(ModelError) as raised:
        roster.gather(Loaded, LIMIT)
    assert str(raised.value) == "rank 1 (host h, pid 101) failed while loading weights: the checkpoint lacks x"
    assert raised.value.exit_code == ModelError.exit_code


def watched(ranks: Ranks) -> tuple[Roster, threading.Event]:
    roster = hello(ranks, through=(Joined(), Loaded(1, THREADS), control.Ready(LAYOUT)))
    roster.gather(control.Ready, LIMIT)
    noticed = threading.Event()
    roster.watch(noticed.set)
    return roster, noticed


THREADS = Threads(1, "1 core for 1 rank", 1, 1)
LAYOUT = control.CacheLayout((), 1, 1)


def cause(ranks: Ranks, roster: Roster, noticed: threading.Event) -> ServeError:
    assert noticed.wait(LIMIT)
    assert roster.failure is roster.cause()
    return roster.cause()


def test_a_death_is_named_with_its_phase(ranks: Ranks) -> None:
    roster, noticed = watched(ranks)
    ranks.gone[1] = "signal SIGSEGV"
    error = cause(ranks, roster, noticed)
    assert type(error) is RankFailed
    assert str(error).startswith("rank 1 (host h, pid 101) died in a step by signal SIGSEGV; ")


def test_a_killed_rank_hints_at_memory(ranks: Ranks) -> None:
    roster, noticed = watched(ranks)
    ranks.gone[0] = "signal SIGKILL"
    assert "by signal SIGKILL; the system may be out of memory" in str(cause(ranks, roster, noticed))


def test_a_rank_that_stays_stopped_has_failed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "BEAT_SECONDS", 0.01)
    roster, noticed = watched(ranks)
    ranks.states[1] = "stopped"
    error = cause(ranks, roster, noticed)
    assert type(error) is RankFailed and str(error) == "rank 1 (host h, pid 101) is stopped in a step"


def test_consequences_that_come_first_are_not_the_cause(ranks: Ranks) -> None:
    roster, noticed = watched(ranks)
    ranks.say(0, Failed("in a step", "PeerLost", "heard nothing from the next stage"))
    ranks.say(1, Failed("in a step", "AssertionError", "row 5 is empty"))
    ranks.gone[0] = "exit code 5"
    error = cause(ranks, roster, noticed)
    assert str(error) == "rank 1 (host h, pid 101) failed in a step: AssertionError: row 5 is empty"


def test_last_words_count_more_than_the_exit_code(ranks: Ranks) -> None:
    roster, noticed = watched(ranks)
    ranks.say(1, Failed("in a step", "MemoryError", ""))
    ranks.gone[1] = "exit code 5"
    assert "failed in a step: MemoryError" in str(cause(ranks, roster, noticed))


@pytest.mark.parametrize(
    ("states", "named"),
    [
        ({0: "waiting", 1: "stopped"}, "rank 1 (host h, pid 101), stopped"),
        ({0: "running", 1: "waiting"}, "rank 0 (host h, pid 100), running"),
        ({0: "waiting", 1: "waiting"}, "rank 0 (host h, pid 100); rank 1 (host h, pid 101), waiting"),
        ({0: "", 1: ""}, "rank 0 (host h, pid 100); rank 1 (host h, pid 101)"),
    ],
)
def test_silence_names_whom_the_others_wait_for(ranks: Ranks, states: dict[int, str], named: str) -> None:
    roster, _ = watched(ranks)
    ranks.states = states
    assert str(roster.silence(300)) == f"{named}: no answer in a step for 300 s"


def test_ends_while_closing_are_no_failures(ranks: Ranks) -> None:
    roster, noticed = watched(ranks)
    ranks.end = lambda cause="": ranks.gone.update({0: "exit code 0", 1: "exit code 0"})
    roster.close()
    roster.close()
    assert roster.failure is None and not noticed.is_set()


def test_a_process_that_is_no_rank_is_ignored(ranks: Ranks) -> None:
    ranks.say(0, Joined())  # before its Hello
    ranks.say(1, control.hello(7))
    hello(ranks, through=(Joined(),)).gather(Joined, LIMIT)


def test_an_error_that_says_all_is_the_failure(ranks: Ranks) -> None:
    ranks.gone = {0: ModelError("node 1: there is no directory m"), 1: ModelError("node 1: there is no directory m")}
    with pytest.raises(ModelError, match=r"^node 1: there is no directory m$"):
        ranks.roster.gather(control.Hello, LIMIT)
    assert ranks.roster.failure is not None


def on_other_hosts() -> tuple[Roster, Ranks]:
    """A roster that is reached over TCP."""
    ranks = Ranks("inproc://unused")

    def launch(url: str) -> Ranks:
        ranks.address = url
        return ranks

    return Roster(2, launch, Endpoint("127.0.0.1", "secret")), ranks


def test_a_rank_whose_connection_is_lost_is_named() -> None:
    """One that said Alive: on another host, where nobody else watches over it."""
    roster, made = on_other_hosts()
    lines = [Line(made.address, "secret") for _ in range(2)]
    try:
        for rank, line in enumerate(lines):
            line.send(control.encode(control.hello(rank)))
            line.send(control.encode(control.Alive(rank)))
        roster.gather(control.Hello, LIMIT)
        noticed = threading.Event()
        roster.watch(noticed.set)
        lines[1].close()
        assert noticed.wait(LIMIT)
        assert str(roster.cause()).startswith(
            "rank 1 (host h, pid 101) died while joining the others by loss of its host"
        )
    finally:
        roster.close()
        lines[0].close()
        for socket in made.sockets:
            socket.close()


def test_that_peers_are_lost_is_the_cause_only_if_nothing_else_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster_module, "LOSS_SECONDS", 60.0)
    roster, made = on_other_hosts()
    line = Line(made.address, "secret")
    try:
        line.send(control.encode(control.hello(0)))
        line.send(control.encode(Failed("in a step", "PeerLost", "connection reset")))
        late = threading.Timer(2 * roster_module.SETTLE_SECONDS, lambda: made.gone.update({1: "loss of its node"}))
        late.start()
        with pytest.raises(RankFailed, match=r"rank 1 \(.*\) died while starting by loss of its node"):
            roster.gather(control.Hello, LIMIT)
    finally:
        roster.close()
        line.close()
        for socket in made.sockets:
            socket.close()


def test_a_message_that_no_rank_sends_ends_nothing(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.sockets[0].send(b"GET / HTTP/1.1")
    ranks.sockets[1].send_multipart([b"", b"x"])
    ranks.sockets[1].send(control.encode(control.Alive(77)))
    assert hello(ranks).failure is None
    assert "ignored a message that no rank of this version sends" in caplog.text


def test_last_words_count_more_than_how_it_ended(ranks: Ranks) -> None:
    roster = hello(ranks)
    ranks.gone[1] = "exit code 3"
    roster._look(0.0)
    ranks.say(1, Failed("while loading weights", "ModelError", "a tensor is missing"))
    with pytest.raises(ModelError, match=r"rank 1 .* failed while loading weights: a tensor is missing"):
        roster.gather(Joined, LIMIT)
