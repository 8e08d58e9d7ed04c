"""The worker group against scripted ranks: real sockets that speak `control`, and fake processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from serve_llm.common.curve_zmq import CurveClient, Endpoint
from serve_llm.common.errors import EngineError, HostLost, ModelError, RankFailed, ServeError
from serve_llm.common.messages import Failed
from serve_llm.common.types import EPLBStats
from serve_llm.engine.distributed import messages
from serve_llm.engine.distributed import worker_group as worker_group_module
from serve_llm.engine.distributed.messages import AllocateCache, GroupsReady, LoadDone
from serve_llm.engine.distributed.worker_group import WorkerGroup
from serve_llm.engine.worker.cpu_threads import CpuThreads

LIMIT = 60.0


class Ranks:
    """Two fake ranks as `LaunchedWorkers`; the test decides when they end."""

    def __init__(self, address: str) -> None:
        self.gone: dict[int, str] = {}
        self.states = {0: "waiting", 1: "waiting"}
        self.sockets = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(2)]
        for socket in self.sockets:
            socket.linger = 0
            socket.connect(address)
        self.ends = 0
        self.address = address

    def say(self, rank: int, message: messages.FromRank) -> None:
        self.sockets[rank].send(messages.encode(message))

    def hear(self, rank: int) -> messages.ToRank:
        return messages.decode_to_rank(self.sockets[rank].recv())

    def find_ended(self) -> dict[int, str]:
        return dict(self.gone)

    def describe_place(self, rank: int) -> str:
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

    worker_group = WorkerGroup(2, launch)
    made[0].worker_group = worker_group
    yield made[0]
    worker_group.close()
    for socket in made[0].sockets:
        socket.close()


def hello(ranks: Ranks, *, through: tuple[messages.FromRank, ...] = ()) -> WorkerGroup:
    """Send Hello from both ranks, and wait for the messages in `through`."""
    for rank in range(2):
        ranks.say(rank, messages.build_hello(rank))
        for message in through:
            ranks.say(rank, message)
    ranks.worker_group.gather(messages.WorkerHello, LIMIT)
    return ranks.worker_group


def test_one_message_from_each_in_rank_order_also_when_some_are_ahead(ranks: Ranks) -> None:
    ranks.say(1, messages.build_hello(1))
    ranks.say(1, GroupsReady())
    ranks.say(1, LoadDone(11, 8, THREADS))  # before any message from rank 0
    ranks.say(0, messages.build_hello(0))
    worker_group: WorkerGroup = ranks.worker_group
    assert [said.rank for said in worker_group.gather(messages.WorkerHello, LIMIT)] == [0, 1]
    ranks.say(0, GroupsReady())
    ranks.say(0, LoadDone(10, 8, THREADS))
    assert worker_group.gather(GroupsReady, LIMIT) == [GroupsReady(), GroupsReady()]
    assert [said.num_blocks for said in worker_group.gather(LoadDone, LIMIT)] == [10, 11]
    for rank in range(2):
        worker_group.send(rank, AllocateCache(10 + rank))
        assert ranks.hear(rank) == AllocateCache(10 + rank)


def test_stats_of_the_expert_load_balancer_are_summed_over_the_ranks(ranks: Ranks) -> None:
    worker_group = hello(ranks)
    assert worker_group.eplb_stats is None
    for rank, stats in ((0, EPLBStats(1, 2, 200, 5.0, 8.0, 6.0)), (1, EPLBStats(1, 1, 100, 4.0, 4.0, 4.0))):
        ranks.say(rank, messages.ExpertsPlaced(stats))
        ranks.say(rank, GroupsReady())
    worker_group.gather(GroupsReady, LIMIT)
    assert worker_group.eplb_stats == EPLBStats(2, 3, 300, 9.0, 12.0, 10.0)
    ranks.say(0, messages.ExpertsPlaced(EPLBStats(2, 4, 400, 6.0, 6.0, 6.0)))  # replaces its previous message
    ranks.say(0, LoadDone(10, 8, THREADS))
    worker_group.gather(LoadDone, LIMIT, [0])
    assert worker_group.eplb_stats == EPLBStats(3, 5, 500, 10.0, 10.0, 10.0)


def test_once_all_are_connected_the_socket_has_no_name(ranks: Ranks) -> None:
    path = Path(ranks.address.removeprefix("ipc://"))
    assert path.exists()
    hello(ranks)
    assert not path.exists() and not path.parent.exists()
    ranks.say(0, GroupsReady())
    ranks.say(1, GroupsReady())
    ranks.worker_group.gather(GroupsReady, LIMIT)


def test_who_has_not_arrived_is_named(ranks: Ranks) -> None:
    ranks.say(1, messages.build_hello(1))
    with pytest.raises(EngineError, match=r"after 0 s still starting: rank 0 \(host h, pid 100\)$"):
        ranks.worker_group.gather(messages.WorkerHello, 0.3)
    ranks.say(0, messages.build_hello(0))
    ranks.say(0, GroupsReady())
    ranks.worker_group.gather(messages.WorkerHello, LIMIT)
    with pytest.raises(EngineError, match=r"still joining the others: rank 1 \(host h, pid 101\)$"):
        ranks.worker_group.gather(GroupsReady, 0.3)


def test_our_own_errors_keep_their_class_and_name_the_rank(ranks: Ranks) -> None:
    worker_group = hello(ranks, through=(GroupsReady(),))
    ranks.say(1, Failed("ModelError", "the checkpoint lacks x"))
    with pytest.raises(ModelError) as raised:
        worker_group.gather(LoadDone, LIMIT)
    assert str(raised.value) == "rank 1 (host h, pid 101) failed while loading weights: the checkpoint lacks x"
    assert raised.value.exit_code == ModelError.exit_code


def watched(ranks: Ranks) -> tuple[WorkerGroup, threading.Event]:
    worker_group = hello(ranks, through=(GroupsReady(), LoadDone(1, 8, THREADS), messages.CacheReady(KV_CACHE_CONFIG)))
    worker_group.gather(messages.CacheReady, LIMIT)
    noticed = threading.Event()
    worker_group.watch(noticed.set)
    return worker_group, noticed


THREADS = CpuThreads(1, "1 core for 1 rank", 1, 1)
KV_CACHE_CONFIG = messages.KVCacheConfig((), 1, 1)


def cause(ranks: Ranks, worker_group: WorkerGroup, noticed: threading.Event) -> ServeError:
    assert noticed.wait(LIMIT)
    assert worker_group.failure is worker_group.cause()
    return worker_group.cause()


def test_a_death_is_named_with_its_phase(ranks: Ranks) -> None:
    worker_group, noticed = watched(ranks)
    ranks.gone[1] = "signal SIGSEGV"
    error = cause(ranks, worker_group, noticed)
    assert type(error) is RankFailed
    assert str(error).startswith("rank 1 (host h, pid 101) died in a step by signal SIGSEGV; ")


def test_a_killed_rank_hints_at_memory(ranks: Ranks) -> None:
    worker_group, noticed = watched(ranks)
    ranks.gone[0] = "signal SIGKILL"
    assert "by signal SIGKILL; the system may be out of memory" in str(cause(ranks, worker_group, noticed))


def test_a_rank_that_stays_stopped_has_failed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group_module, "BEAT_SECONDS", 0.01)
    worker_group, noticed = watched(ranks)
    ranks.states[1] = "stopped"
    error = cause(ranks, worker_group, noticed)
    assert type(error) is RankFailed and str(error) == "rank 1 (host h, pid 101) is stopped in a step"


def test_consequences_that_come_first_are_not_the_cause(ranks: Ranks) -> None:
    worker_group, noticed = watched(ranks)
    ranks.say(0, Failed("PeerLost", "heard nothing from the next stage"))
    ranks.say(1, Failed("AssertionError", "row 5 is empty"))
    ranks.gone[0] = "exit code 5"
    error = cause(ranks, worker_group, noticed)
    assert str(error) == "rank 1 (host h, pid 101) failed in a step: AssertionError: row 5 is empty"


def test_last_words_count_more_than_the_exit_code(ranks: Ranks) -> None:
    worker_group, noticed = watched(ranks)
    ranks.say(1, Failed("MemoryError", ""))
    ranks.gone[1] = "exit code 5"
    assert "failed in a step: MemoryError" in str(cause(ranks, worker_group, noticed))


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
    worker_group, _ = watched(ranks)
    ranks.states = states
    assert str(worker_group.build_silence_error(300)) == f"{named}: no answer in a step for 300 s"


def test_ends_while_closing_are_no_failures(ranks: Ranks) -> None:
    worker_group, noticed = watched(ranks)
    ranks.end = lambda cause="": ranks.gone.update({0: "exit code 0", 1: "exit code 0"})
    worker_group.close()
    worker_group.close()
    assert worker_group.failure is None and not noticed.is_set()


def test_a_process_that_is_no_rank_is_ignored(ranks: Ranks) -> None:
    ranks.say(0, GroupsReady())  # before its Hello
    ranks.say(1, messages.build_hello(7))
    hello(ranks, through=(GroupsReady(),)).gather(GroupsReady, LIMIT)


def test_an_error_that_says_all_is_the_failure(ranks: Ranks) -> None:
    ranks.gone = {0: ModelError("node 1: there is no directory m"), 1: ModelError("node 1: there is no directory m")}
    with pytest.raises(ModelError, match=r"^node 1: there is no directory m$"):
        ranks.worker_group.gather(messages.WorkerHello, LIMIT)
    assert ranks.worker_group.failure is not None


def on_other_hosts() -> tuple[WorkerGroup, Ranks]:
    """Build a worker group that is reached over TCP."""
    ranks = Ranks("inproc://unused")

    def launch(url: str) -> Ranks:
        ranks.address = url
        return ranks

    return WorkerGroup(2, launch, Endpoint("127.0.0.1", "secret")), ranks


def test_a_rank_whose_connection_is_lost_is_named() -> None:
    """The rank had sent WorkerAlive: it is on another host, where nothing else watches it."""
    worker_group, made = on_other_hosts()
    lines = [CurveClient(made.address, "secret") for _ in range(2)]
    try:
        for rank, line in enumerate(lines):
            line.send(messages.encode(messages.build_hello(rank)))
            line.send(messages.encode(messages.WorkerAlive(rank)))
        worker_group.gather(messages.WorkerHello, LIMIT)
        noticed = threading.Event()
        worker_group.watch(noticed.set)
        lines[1].close()
        assert noticed.wait(LIMIT)
        assert str(worker_group.cause()).startswith(
            "rank 1 (host h, pid 101) died while joining the others by loss of its host"
        )
    finally:
        worker_group.close()
        lines[0].close()
        for socket in made.sockets:
            socket.close()


def test_that_peers_are_lost_is_the_cause_only_if_nothing_else_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group_module, "LOSS_SECONDS", 60.0)
    worker_group, made = on_other_hosts()
    line = CurveClient(made.address, "secret")
    try:
        line.send(messages.encode(messages.build_hello(0)))
        line.send(messages.encode(Failed("PeerLost", "connection reset")))
        late = threading.Timer(
            2 * worker_group_module.SETTLE_SECONDS, lambda: made.gone.update({1: HostLost("loss of its node")})
        )
        late.start()
        with pytest.raises(HostLost, match=r"rank 1 \(.*\) died while starting by loss of its node"):
            worker_group.gather(messages.WorkerHello, LIMIT)
    finally:
        worker_group.close()
        line.close()
        for socket in made.sockets:
            socket.close()


def test_a_message_that_no_rank_sends_ends_nothing(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.sockets[0].send(b"GET / HTTP/1.1")
    ranks.sockets[1].send_multipart([b"", b"x"])
    ranks.sockets[1].send(messages.encode(messages.WorkerAlive(77)))
    assert hello(ranks).failure is None
    assert "ignored a message that no rank of this version sends" in caplog.text


def test_last_words_count_more_than_how_it_ended(ranks: Ranks) -> None:
    worker_group = hello(ranks)
    ranks.say(1, GroupsReady())
    ranks.gone[1] = "exit code 3"
    worker_group._update(0.0)
    ranks.say(1, Failed("ModelError", "a tensor is missing"))
    with pytest.raises(ModelError, match=r"rank 1 .* failed while loading weights: a tensor is missing"):
        worker_group.gather(GroupsReady, LIMIT)


def test_an_error_describes_a_few_of_many_ranks(ranks: Ranks) -> None:
    worker_group: WorkerGroup = ranks.worker_group
    text = str(worker_group.build_loss_error(range(20)))
    assert text.count("host h, pid") == 8
    assert "rank 7 (host h, pid 107); and 12 others: the connection for steps is lost" in text
