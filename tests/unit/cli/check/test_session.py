"""Node 0 when other nodes fail during the check; whole runs are in tests/e2e/test_check.py."""

from __future__ import annotations

from collections.abc import Iterable
from unittest.mock import Mock

import msgspec
import pytest

from serve_llm.cli.check import session
from serve_llm.cli.check.collective import AllReduceResult, AllReduceTask
from serve_llm.cli.check.host import inspect_host
from serve_llm.cli.check.probe import LinkSpeed, Reachability
from serve_llm.common.errors import EngineError


class ScriptedHost:
    """Answers every task at once, as a healthy host would."""

    def __init__(self, rank: int, size: int) -> None:
        self.report = inspect_host(rank, "127.0.0.1", 1, None)
        self._others = [other for other in range(size) if other != rank]

    def run(self, task: session.Task) -> session.TaskResult:
        rank = self.report.rank
        if isinstance(task, session.SpeedTask):
            return session.TaskResult(speed=LinkSpeed(source=rank, target=task.target, bandwidth=1e9))
        if isinstance(task, AllReduceTask):
            return session.TaskResult(collectives=[AllReduceResult(backend="gloo", small_us=1, large=1)])
        reaches = [Reachability(source=rank, target=other) for other in self._others]
        return session.TaskResult(
            reaches=reaches if isinstance(task, session.ConnectTask) else [], store_port=1, time=1e9
        )


class ScriptedGroup:
    """The other nodes. For a task of the given type, node 1 answers with `garbage`, or disconnects if that is None."""

    def __init__(self, size: int, silent_at: type[msgspec.Struct] | None, garbage: bytes | None) -> None:
        self._hosts = {rank: ScriptedHost(rank, size) for rank in range(1, size)}
        self.reports = {rank: host.report for rank, host in self._hosts.items()}
        self.lost: dict[int, str] = {}
        self.verdicts: dict[int, session.Verdict] = {}
        self._silent_at = silent_at
        self._garbage = garbage
        self._answers: dict[int, bytes] = {}

    def send(self, rank: int, message: bytes) -> None:
        task: session.Task | session.Verdict = msgspec.json.decode(message, type=session.Task | session.Verdict)
        if rank in self.lost:
            return
        if isinstance(task, session.Verdict):
            self.verdicts[rank] = task
        elif rank == 1 and self._silent_at is not None and isinstance(task, self._silent_at):
            if self._garbage is None:
                self.drop(rank, "has ended")
            else:
                self._answers[rank] = self._garbage
        else:
            self._answers[rank] = msgspec.json.encode(self._hosts[rank].run(task))

    def drop(self, rank: int, reason: str) -> None:
        self.lost[rank] = f"node {rank} {reason}"

    def collect(self, ranks: Iterable[int], seconds: float) -> dict[int, bytes]:
        return {rank: self._answers.pop(rank) for rank in ranks if rank not in self.lost}


def run(silent_at: type[msgspec.Struct] | None, garbage: bytes | None = None) -> tuple[session.Verdict, ScriptedGroup]:
    group = ScriptedGroup(3, silent_at, garbage)
    return session.Coordinator(ScriptedHost(0, 3), group, {}).run(), group  # type: ignore[arg-type]


def test_every_node_gets_the_verdict() -> None:
    verdict, group = run(None)
    assert group.verdicts == {1: verdict, 2: verdict}
    assert "gloo all-reduce: exact" in verdict.text and "node 1 has ended" not in verdict.text


def test_a_node_that_falls_silent_is_named_and_left_out() -> None:
    tasks = (session.ConnectTask, session.ClockTask, session.LoadTask, session.SpeedTask, AllReduceTask)
    for task in tasks:
        verdict, group = run(task)
        assert not verdict.good and verdict.text.count("node 1 has ended, in the middle of the check") == 1
        assert group.verdicts == {2: verdict}


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"[]", b'{"time": "noon"}'])
@pytest.mark.parametrize("task", [session.ConnectTask, session.SpeedTask])
def test_a_node_that_is_not_understood_is_named_and_left_out(task: type[msgspec.Struct], garbage: bytes) -> None:
    verdict, group = run(task, garbage)
    assert not verdict.good and verdict.text.count("node 1 sends what node 0 does not understand") == 1
    assert group.verdicts == {2: verdict}


@pytest.mark.parametrize("garbage", [b"", b"\xff", b'{"type": "NoSuchTask"}'])
def test_a_node_that_does_not_understand_node_0_says_so(garbage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Mock()
    line.receive.return_value = garbage
    monkeypatch.setattr(session, "join", lambda *_: (line, 1.0))
    with pytest.raises(EngineError, match="is it the same version of serve-llm"):
        session.follow(ScriptedHost(1, 2), "127.0.0.1", 1, 2, 1.0, "")  # type: ignore[arg-type]
    line.close.assert_called_once()


def test_every_pair_is_measured_in_both_directions() -> None:
    verdict, _ = run(None)
    rows = [line.split()[:2] for line in verdict.text.splitlines() if line.endswith("/s") and " ok " in line]
    assert sorted(rows) == [[str(a), str(b)] for a in range(3) for b in range(3) if a != b]
