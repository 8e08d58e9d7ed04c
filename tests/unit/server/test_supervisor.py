"""Replacing engines: an expert-parallel group as one unit, independent engines one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from serve_llm.common.errors import EngineDead, HostLost, PeerLost, RankFailed, ServeError
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import make_options
from serve_llm.server.engines import supervisor
from serve_llm.server.engines.process import EngineDeath
from serve_llm.server.engines.supervisor import Supervisor
from serve_llm.server.metrics.meter import Meter
from support.fakes import ScriptedEngine

SHARED = {"data_parallel_size": 3, "enable_expert_parallel": True}
RANK = EngineDeath(RankFailed("engine 2: a rank failed"), "rank")
LOST = EngineDeath(PeerLost("engine 0: heard nothing"), "failed")


class Client(ScriptedEngine):
    """An engine with the further members that the supervisor uses."""

    def __init__(self, directory: str, meter: Meter) -> None:
        super().__init__(lambda request: range(100), automatic=False, meter=meter)
        self.directory = directory
        self.heartbeat = self

    def under_way(self) -> list[int]:
        return list(self.open)

    def fail(self, error: ServeError) -> None:
        self.ready = False


class Process:
    """An engine process that dies when `death` is set."""

    made: list[Process]
    broken: list[int]  # indices whose next start fails

    def __init__(
        self,
        options: Options,
        directory: str,
        index: int,
        meter: Meter,
        *,
        replaces: bool = False,
        meeting: str | None = None,
    ) -> None:
        self.client: Any = Client(f"directory of process {len(self.made)}", meter)
        self.meeting = (meeting or self.client.directory) if options.experts_span_engines else None
        self.index, self.replaces, self.stopped = index, replaces, False
        self.asked_to_end = False
        self.death: asyncio.Future[EngineDeath] = asyncio.get_running_loop().create_future()
        self.made.append(self)

    async def start(self) -> None:
        if self.index in self.broken:
            self.broken.remove(self.index)
            raise EngineDead("it did not come up")

    async def watch(self) -> EngineDeath:
        return await asyncio.shield(self.death)

    async def stop(self, patience: float = 0.0) -> None:
        self.asked_to_end |= self.client.ready
        self.stopped = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    monkeypatch.setattr(supervisor, "EngineProcess", Process)
    Process.made, Process.broken = [], []
    return Process.made


def replace(supervisor: Supervisor, made: list[Process], number: int) -> Any:
    """Wait until `number` processes have been created and all engines are ready."""

    async def run() -> None:
        while len(made) < number or not all(engine.ready for engine in supervisor.replicas.engines):
            await asyncio.sleep(0)

    return asyncio.wait_for(run(), 10)


@pytest.mark.parametrize("others", [{}, {0: LOST, 1: LOST}], ids=["alone", "after its consequences"])
def test_a_group_is_replaced_and_the_first_cause_is_reported(
    made: list[Process], others: dict[int, EngineDeath]
) -> None:
    async def run() -> None:
        supervisor = Supervisor(make_options("demo", **SHARED), "/model")
        await supervisor.start()
        for index, death in others.items():
            made[index].death.set_result(death)
            await asyncio.sleep(0)
        made[2].death.set_result(RANK)
        await replace(supervisor, made, 6)
        replicas = supervisor.replicas
        assert replicas.first_cause == "engine 2: a rank failed" and replicas.num_restarts == 3
        assert all(process.stopped and not process.asked_to_end for process in made[:3])
        assert [process.meeting for process in made] == [made[0].client.directory] * 3 + [made[3].client.directory] * 3
        assert [process.replaces for process in made] == [False] * 3 + [True] * 3
        counted = [{reason: n for reason, n in engine.meter.restarts.items() if n} for engine in replicas.engines]
        assert counted == [{"peer": 1}, {"peer": 1}, {"rank": 1}]
        assert all(engine.engine is process.client for engine, process in zip(replicas.engines, made[3:], strict=True))
        await supervisor.stop()

    asyncio.run(run())


def test_a_failed_restart_replaces_the_whole_group_again(made: list[Process]) -> None:
    async def run() -> None:
        supervisor = Supervisor(make_options("demo", **SHARED), "/model")
        await supervisor.start()
        Process.broken.append(1)
        made[0].death.set_result(EngineDeath(EngineDead("it died"), "killed"))
        await replace(supervisor, made, 9)
        assert all(process.stopped for process in made[:6])
        assert supervisor.replicas.first_cause == "it did not come up"
        await supervisor.stop()

    asyncio.run(run())


def test_the_loss_of_a_host_blames_no_request(made: list[Process], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests may run on an engine that is lost with the same host a moment later."""
    blamed: list[Mapping[int, Collection[int]]] = []
    monkeypatch.setattr(Client, "under_way", lambda self: [7])
    monkeypatch.setattr(supervisor.Replicas, "lose", lambda self, lost, cause: blamed.append(lost))

    async def run() -> None:
        supervisor = Supervisor(make_options("demo", data_parallel_size=2), "/model")
        await supervisor.start()
        for index, error in enumerate((HostLost("its host is lost"), RankFailed("a rank failed"))):
            made[index].death.set_result(EngineDeath(error, "rank"))
            while len(made) < index + 3:
                await asyncio.sleep(0)
        await supervisor.stop()

    asyncio.run(run())
    assert [{index: list(ids) for index, ids in lost.items()} for lost in blamed] == [{0: []}, {1: [7]}]


def test_independent_engines_are_replaced_one_by_one(made: list[Process]) -> None:
    async def run() -> None:
        supervisor = Supervisor(make_options("demo", data_parallel_size=3), "/model")
        await supervisor.start()
        made[1].death.set_result(RANK)
        await replace(supervisor, made, 4)
        assert [process.stopped for process in made] == [False, True, False, False]
        assert [process.meeting for process in made] == [None] * 4 and made[3].index == 1
        await supervisor.stop()

    asyncio.run(run())
