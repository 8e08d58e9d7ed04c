"""The master's course when other nodes fail in the middle; whole runs are in tests/e2e/test_check.py."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from serve_llm.engine.check import session
from serve_llm.engine.check.collective import Collective, Reduce
from serve_llm.engine.check.host import HostReport, examine
from serve_llm.engine.check.probe import Reach, Speed
from serve_llm.engine.errors import EngineError


class ScriptedNode:
    """Does what a healthy host would, at once; or falls silent at a task of the kind given."""

    def __init__(self, rank: int, number: int, silent_at: type[msgspec.Struct] | None = None) -> None:
        self.report = examine(rank, "127.0.0.1", 1, None)
        self._others = [other for other in range(number) if other != rank]
        self._silent_at = silent_at
        self._task: session.Task | session.End | None = None
        self.end: session.End | None = None

    def do(self, task: session.Task) -> session.Done:
        if isinstance(task, session.Measure):
            return session.Done(speed=Speed(source=self.report.rank, target=task.rank, there=1e9, back=1e9))
        if isinstance(task, Reduce):
            return session.Done(collectives=[Collective(backend="gloo", small_us=1, large=1)])
        rank = self.report.rank
        reaches = [Reach(source=rank, target=other) for other in self._others]
        return session.Done(reaches=reaches if isinstance(task, session.Reachable) else [], store_port=1, time=1e9)

    def send(self, message: msgspec.Struct) -> None:
        if isinstance(message, session.End):
            self.end = message
        else:
            self._task = message  # type: ignore[assignment]

    def receive(self, kind: type[session.Done], seconds: float) -> session.Done:
        if self._silent_at is not None and isinstance(self._task, self._silent_at):
            raise EngineError(f"node {self.report.rank} has ended")
        assert self._task is not None and not isinstance(self._task, session.End)
        return self.do(self._task)


class ScriptedMembers:
    def __init__(self, *others: ScriptedNode) -> None:
        self.nodes: Mapping[int, tuple[HostReport, session.Link]] = {
            other.report.rank: (other.report, other) for other in others
        }

    def wait(self) -> dict[int, str]:
        return {}


def run(silent_at: type[msgspec.Struct] | None) -> tuple[session.End, list[ScriptedNode]]:
    others = [ScriptedNode(1, 3, silent_at), ScriptedNode(2, 3)]
    return session.Master(ScriptedNode(0, 3), ScriptedMembers(*others)).run(), others  # type: ignore[arg-type]


def test_everyone_gets_the_result() -> None:
    end, others = run(None)
    assert others[0].end == others[1].end == end
    assert "gloo all-reduce: exact" in end.text and "node 1 has ended" not in end.text


def test_node_that_falls_silent_is_named_and_left_out() -> None:
    for kind in (session.Reachable, session.Clock, session.Load, session.Measure, Reduce):
        end, others = run(kind)
        assert not end.good and end.text.count("node 1 has ended, in the middle of the check") == 1
        assert others[0].end is None and others[1].end == end
