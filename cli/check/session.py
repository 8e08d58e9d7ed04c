"""The course of a check over several hosts: node 0 sends tasks to all hosts and collects their results."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from serve_llm.cli.check import probe
from serve_llm.cli.check.collective import AllReduceProcess, AllReduceResult, AllReduceTask
from serve_llm.cli.check.findings import Results, find_problems
from serve_llm.cli.check.host import HostReport, inspect_host
from serve_llm.cli.check.rendezvous import CheckJoinRequest, CheckRendezvous, join
from serve_llm.cli.check.table import render
from serve_llm.common.errors import EngineError, PeerLost

CONNECT_SECONDS = 15.0
LOAD_SECONDS = 60.0  # torch from a slow disk
MEASURE_SECONDS = 10.0
REDUCE_SECONDS = 150.0  # NCCL may take most of it
MARGIN_SECONDS = 5.0  # for messages, beyond the limit of the task itself
NOT_UNDERSTOOD = "node 0 sends what this node does not understand: is it the same version of serve-llm?"


class ClockTask(msgspec.Struct, frozen=True, tag=True):
    """Report the time of day."""


class ConnectTask(msgspec.Struct, frozen=True, tag=True):
    """Connect to all other hosts."""

    hosts: list[HostReport]


class LoadTask(msgspec.Struct, frozen=True, tag=True):
    """Wait until torch is imported; a busy host would distort the next measurements."""


class SpeedTask(msgspec.Struct, frozen=True, tag=True):
    """Measure latency and bandwidth to one host."""

    target: int


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """The end of the check: the report for people, and whether there is no problem."""

    text: str
    good: bool


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a host found; fields that do not concern the task keep their defaults."""

    time: float = 0.0  # seconds since the epoch
    reaches: list[probe.Reachability] = []
    heard: set[int] = set()
    speed: probe.LinkSpeed | None = None
    store_port: int = 0
    collectives: list[AllReduceResult] = []


Task = ClockTask | ConnectTask | LoadTask | SpeedTask | AllReduceTask


class CheckedHost:
    """This host: its report, its probe server, its all-reduce process, and the tasks that it runs."""

    def __init__(self, rank: int, address: str, model: str | None) -> None:
        """Raises OptionError if the address does not belong to this host."""
        self._server = probe.ProbeServer(address)
        self._process = AllReduceProcess(address)
        try:
            self.report = inspect_host(rank, address, self._server.port, model)
        except BaseException:
            self._process.close()
            raise
        self._hosts = {rank: self.report}

    def __enter__(self) -> CheckedHost:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def run(self, task: Task) -> TaskResult:
        if isinstance(task, ClockTask):
            return TaskResult(time=time.time())
        if isinstance(task, ConnectTask):
            self._hosts = {report.rank: report for report in task.hosts}
            others = [report for report in task.hosts if report.rank != self.report.rank]
            self._server.send_hello(self.report.rank, others)
            reaches = probe.reach_all(self.report, others)
            return TaskResult(reaches=reaches, heard=set(self._server.heard))
        if isinstance(task, LoadTask):
            return TaskResult(store_port=self._process.wait_for_store(LOAD_SECONDS))
        if isinstance(task, SpeedTask):
            return TaskResult(speed=probe.measure_speed(self.report, self._hosts[task.target]))
        report = self.report
        own_task = msgspec.structs.replace(
            task, rank=report.rank, own_address=report.address, interface=report.interface
        )
        return TaskResult(collectives=self._process.all_reduce(own_task, REDUCE_SECONDS))


def follow(host: CheckedHost, master: str, port: int, nnodes: int, seconds: float, secret: str) -> Verdict:
    """Join node 0 and run its tasks until the verdict. Raises EngineError or OptionError, see `join`."""
    line, wait_seconds = join(master, port, CheckJoinRequest(nnodes, host.report), seconds, secret)
    try:
        while True:
            frame = line.receive(wait_seconds + LOAD_SECONDS + REDUCE_SECONDS)
            if frame is None:
                raise EngineError("node 0 sends nothing more; look at what it printed")
            message: Task | Verdict = msgspec.json.decode(frame, type=Task | Verdict)
            if isinstance(message, Verdict):
                return message
            line.send(msgspec.json.encode(host.run(message)))
    except PeerLost:
        raise EngineError("node 0 has ended; look at what it printed") from None
    except msgspec.DecodeError:
        raise EngineError(NOT_UNDERSTOOD) from None
    finally:
        line.close()


class Coordinator:
    """Node 0 of a check over several hosts."""

    def __init__(self, host: CheckedHost, group: CheckRendezvous, absent: dict[int, str]) -> None:
        """absent: why a node has not joined, by rank."""
        self._host = host
        self._group = group
        self._absent = absent

    def run(self) -> Verdict:
        """Run the whole check and send every node the verdict."""
        group = self._group
        reports = {0: self._host.report, **group.reports}
        results = Results(hosts=dict(sorted(reports.items())), absent=self._absent)
        if len(reports) > 1:
            self._compare_clocks(results)
            self._connect(results)
            is_complete = not self._absent and not group.lost
            if is_complete and not any(reach.failure or reach.large_lost for reach in results.reaches):
                loaded = self._run_all(results, LoadTask(), LOAD_SECONDS)
                self._measure_speeds(results)
                if not group.lost:
                    self._all_reduce(results, loaded[0].store_port)
        results.silent = [
            f"{reason}, in the middle of the check; look at what it printed" for reason in group.lost.values()
        ]
        findings = find_problems(results)
        verdict = Verdict(render(results, findings), not findings.problems)
        for rank in group.reports:
            group.send(rank, msgspec.json.encode(verdict))
        return verdict

    def _compare_clocks(self, results: Results) -> None:
        """A clock's offset is its reading minus the middle of the round trip."""
        for rank in self._group.reports:
            began = time.time()
            for result in self._run({rank: ClockTask()}, 0.0).values():
                results.clocks[rank] = result.time - (began + time.time()) / 2

    def _connect(self, results: Results) -> None:
        task = ConnectTask(list(results.hosts.values()))
        for rank, result in self._run_all(results, task, CONNECT_SECONDS).items():
            results.reaches += result.reaches
            results.heard[rank] = result.heard

    def _measure_speeds(self, results: Results) -> None:
        """In each round, every host measures one other host and is measured by one."""
        size = len(results.hosts)
        for shift in range(1, size):
            tasks = {rank: SpeedTask((rank + shift) % size) for rank in range(size)}
            for result in self._run(tasks, MEASURE_SECONDS).values():
                if result.speed is not None:
                    results.speeds.append(result.speed)

    def _all_reduce(self, results: Results, port: int) -> None:
        task = AllReduceTask(address=self._host.report.address, port=port, size=len(results.hosts))
        for rank, result in self._run_all(results, task, REDUCE_SECONDS).items():
            results.collectives[rank] = result.collectives

    def _run_all(self, results: Results, task: Task, seconds: float) -> dict[int, TaskResult]:
        return self._run(dict.fromkeys(results.hosts, task), seconds)

    def _run(self, tasks: Mapping[int, Task], seconds: float) -> dict[int, TaskResult]:
        """Run each host's task, all at the same time; by rank, without the nodes that are lost."""
        group = self._group
        others = [rank for rank in tasks if rank != 0 and rank not in group.lost]
        for rank in others:
            group.send(rank, msgspec.json.encode(tasks[rank]))
        results = {}
        if 0 in tasks:
            results[0] = self._host.run(tasks[0])
        for rank, message in group.collect(others, seconds + MARGIN_SECONDS).items():
            try:
                results[rank] = msgspec.json.decode(message, type=TaskResult)
            except msgspec.DecodeError:
                group.drop(rank, "sends what node 0 does not understand (is it the same version of serve-llm?)")
        return results
