"""The course of a check: the master says what is to be done, every node does it, the master collects.

master: gather the nodes, then for each task: tell all, do it itself, collect; at the end judge and tell the result
others: join, then do what they are told until the result comes
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Protocol

import msgspec

from serve_llm.engine.check import probe
from serve_llm.engine.check.collective import Collective, Process, Reduce
from serve_llm.engine.check.findings import Results, judge, slow_pairs
from serve_llm.engine.check.host import HostReport, examine
from serve_llm.engine.check.join import Arrival, join
from serve_llm.engine.check.table import render
from serve_llm.engine.errors import EngineError

LOAD_SECONDS = 60.0  # torch from a slow disk
REDUCE_SECONDS = 40.0
_CLOCK_TRIES = 5


class Reachable(msgspec.Struct, frozen=True, tag=True):
    """Call all the other hosts."""

    hosts: list[HostReport]


class Heard(msgspec.Struct, frozen=True, tag=True):
    """Say whose datagrams arrived."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Wait until torch is imported: a busy host would spoil what is measured next."""


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Measure the speed to that host."""

    rank: int


class Clock(msgspec.Struct, frozen=True, tag=True):
    """Say the time."""


class End(msgspec.Struct, frozen=True, tag=True):
    """The check is over."""

    text: str
    good: bool


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A node's answer to any task; what the task was not about is empty."""

    reaches: list[probe.Reach] = []
    heard: set[int] = set()
    speed: probe.Speed | None = None
    time: float = 0.0
    collectives: list[Collective] = []
    store_port: int = 0


Task = Reachable | Heard | Clock | Load | Measure | Reduce


class Node:
    """One host: its report, its server for probes, and what it does when told. A context manager."""

    def __init__(self, rank: int, address: str, model: str | None) -> None:
        """Raises OptionError if the address is not this host's."""
        self._server = probe.Server(address)
        self._reducer = Process(address)
        self.report = examine(rank, address, self._server.port, model)
        self._hosts = {rank: self.report}

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self._reducer.close()

    def do(self, task: Task) -> Done:
        if isinstance(task, Reachable):
            self._hosts = {report.rank: report for report in task.hosts}
            others = [report for report in task.hosts if report.rank != self.report.rank]
            self._server.hello(self.report.rank, others)
            return Done(reaches=probe.reach(self.report, others))
        if isinstance(task, Heard):
            return Done(heard=set(self._server.heard))
        if isinstance(task, Measure):
            return Done(speed=probe.speed(self.report, self._hosts[task.rank]))
        if isinstance(task, Clock):
            return Done(time=time.time())
        if isinstance(task, Load):
            return Done(store_port=self._reducer.store_port(LOAD_SECONDS))
        own = self.report
        told = msgspec.structs.replace(task, rank=own.rank, own_address=own.address, interface=own.interface)
        return Done(collectives=self._reducer.reduce(told, REDUCE_SECONDS))


def follow(node: Node, master: str, port: int, nnodes: int, seconds: float) -> End:
    """Join the master and do what it says. Raises EngineError or OptionError, see `join`."""
    channel, waiting = join(master, port, Arrival(nnodes, node.report), seconds)
    while True:
        task = channel.receive(Task | End, waiting + LOAD_SECONDS + REDUCE_SECONDS)  # type: ignore[arg-type]
        if isinstance(task, End):
            return task
        channel.send(node.do(task))


class Link(Protocol):
    """To another node: `join.Channel`, or over Ray."""

    def send(self, message: msgspec.Struct) -> None: ...
    def receive(self, kind: type[Done], seconds: float) -> Done: ...


class Members(Protocol):
    """The other nodes: `join.Gathering`, or over Ray."""

    @property
    def nodes(self) -> Mapping[int, tuple[HostReport, Link]]: ...
    def wait(self) -> dict[int, str]: ...


class Master:
    """Node 0 of a check over several hosts."""

    def __init__(self, node: Node, members: Members) -> None:
        self._node, self._members = node, members
        self._channels: dict[int, Link] = {}

    def run(self) -> End:
        """The whole check."""
        absent = self._members.wait()
        self._channels = {rank: channel for rank, (_, channel) in self._members.nodes.items()}
        reports = [self._node.report, *(report for report, _ in self._members.nodes.values())]
        results = Results(
            hosts={report.rank: report for report in sorted(reports, key=lambda report: report.rank)}, absent=absent
        )
        if len(reports) > 1:
            self._connections(results)
            whole = not absent and not results.silent
            if whole and not any(reach.failure or reach.large_lost for reach in results.reaches):
                loaded = self._all(results, Load(), sorted(results.hosts), LOAD_SECONDS + 5)
                self._speeds(results)
                if not results.silent:
                    self._reduce(results, loaded[0].store_port)
        findings = judge(results)
        end = End(render(results, findings), not findings.problems)
        for channel in self._channels.values():
            with suppress(EngineError):  # the result stands, and is printed here
                channel.send(end)
        return end

    def _connections(self, results: Results) -> None:
        ranks = sorted(results.hosts)
        for done in self._all(results, Reachable(list(results.hosts.values())), ranks, 15.0).values():
            results.reaches += done.reaches
        results.heard = {rank: done.heard for rank, done in self._all(results, Heard(), ranks, 5.0).items()}
        for rank in list(self._channels):
            self._clock(results, rank)

    def _clock(self, results: Results, rank: int) -> None:
        """As NTP does: the reading with the shortest round trip, half of which is the way there."""
        best = (float("inf"), 0.0)
        for _ in range(_CLOCK_TRIES):
            began, before = time.perf_counter(), time.time()
            for done in self._all(results, Clock(), [rank], 5.0).values():
                trip = time.perf_counter() - began
                best = min(best, (trip, done.time - before - trip / 2))
        if best[0] < float("inf"):
            results.clocks[rank] = best[1]

    def _speeds(self, results: Results) -> None:
        for pairs in rounds(sorted(results.hosts)):
            tasks = {first: Measure(second) for first, second in pairs}
            results.speeds += [done.speed for done in self._each(results, tasks, 10.0).values() if done.speed]
        for slow in slow_pairs(results):  # once more: it may only have been busy
            for done in self._each(results, {slow.source: Measure(slow.target)}, 10.0).values():
                if done.speed:
                    results.speeds[results.speeds.index(slow)] = done.speed

    def _reduce(self, results: Results, port: int) -> None:
        task = Reduce(address=self._node.report.address, port=port, size=len(results.hosts))
        done = self._all(results, task, sorted(results.hosts), REDUCE_SECONDS + 5)
        results.collectives = {rank: one.collectives for rank, one in done.items()}

    def _all(self, results: Results, task: Task, ranks: Iterable[int], seconds: float) -> dict[int, Done]:
        return self._each(results, dict.fromkeys(ranks, task), seconds)

    def _each(self, results: Results, tasks: Mapping[int, Task], seconds: float) -> dict[int, Done]:
        """Everyone's answer to its task, all at once. A node that does not answer is noted and left out then."""
        done: dict[int, Done] = {}
        asked = {rank: self._channels[rank] for rank in tasks if rank in self._channels}
        for rank, channel in asked.items():
            with self._noting(results, rank):
                channel.send(tasks[rank])
        if 0 in tasks:
            done[0] = self._node.do(tasks[0])
        deadline = time.monotonic() + seconds
        for rank, channel in asked.items():
            with self._noting(results, rank):
                done[rank] = channel.receive(Done, max(1.0, deadline - time.monotonic()))
        return done

    @contextmanager
    def _noting(self, results: Results, rank: int) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            if self._channels.pop(rank, None):
                results.silent.append(f"{error}, in the middle of the check; look at what it printed")


def rounds(ranks: list[int]) -> Iterator[list[tuple[int, int]]]:
    """All pairs, such that within a round nobody has two: the first stays, the others go round (a tournament)."""
    seats: list[int | None] = [*ranks, None] if len(ranks) % 2 else [*ranks]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]
