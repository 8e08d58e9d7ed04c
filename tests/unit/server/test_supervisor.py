"""Replacing engines: an expert-parallel group as one unit, independent engines one by one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from serve_llm.common.errors import CapacityError, EngineDead, HostLost, ModelError, PeerLost, RankFailed, ServeError
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.server.engines import supervisor
from serve_llm.server.engines.process import EngineDeath
from serve_llm.server.engines.supervisor import Supervisor
from serve_llm.server.metrics.meter import Meter
from support.fakes import ScriptedEngine, make_model_info

SHARED = {"data_parallel_size": 3, "enable_expert_parallel": True}
RANK = EngineDeath(RankFailed("engine 2: a rank failed"), "rank")
LOST = EngineDeath(PeerLost("engine 0: heard nothing"), "failed")


class Client(ScriptedEngine):
    """An engine with the further members that the supervisor uses."""

    def __init__(self, directory: str, meter: Meter) -> None:
        super().__init__(lambda request: range(100), automatic=False, meter=meter)
        self.directory = directory
        self.heartbeat = self

    def read_running_ids(self) -> list[int]:
        return list(self.open)

    def fail(self, error: ServeError) -> None:
        self.ready = False


class Process:
    """An engine process that dies when `death` is set."""

    made: list[Process]
    broken: list[int]  # indices whose next start fails
    unlaunchable: list[int]  # indices whose next launch fails
    may_start: asyncio.Event | None = None  # replacements wait for it

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
        if index in self.unlaunchable:
            self.unlaunchable.remove(index)
            raise CapacityError("it cannot be launched")
        self.client: Any = Client(f"directory of process {len(self.made)}", meter)
        self.meeting = (meeting or self.client.directory) if options.experts_span_engines else None
        self.device = options.device
        self.index, self.replaces, self.stopped = index, replaces, False
        self.asked_to_end = False
        self.death: asyncio.Future[EngineDeath] = asyncio.get_running_loop().create_future()
        self.made.append(self)

    async def start(self) -> None:
        if self.index in self.broken:
            self.broken.remove(self.index)
            raise EngineDead("it did not come up")
        if self.replaces and self.may_start is not None:
            await self.may_start.wait()

    async def watch(self) -> EngineDeath:
        return await asyncio.shield(self.death)

    async def stop(self, patience: float = 0.0) -> None:
        self.asked_to_end |= self.client.ready
        self.stopped = True
        self.client.fail(EngineDead("the engine was stopped"))
        self.client.heartbeat = None  # the real one is closed


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    monkeypatch.setattr(supervisor, "EngineProcess", Process)
    Process.made = []
    Process.broken = []
    Process.unlaunchable = []
    return Process.made


@pytest.fixture
def blamed(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[int, Collection[int]]]:
    """blamed: collects the requests that each death blames; engines have request 7 in their steps."""
    found: list[Mapping[int, Collection[int]]] = []
    monkeypatch.setattr(Client, "read_running_ids", lambda self: [7])
    monkeypatch.setattr(supervisor.Replicas, "drop_lost", lambda self, lost, cause: found.append(lost))
    return found


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


def test_a_replacement_that_cannot_be_launched_is_tried_again_and_does_not_count(made: list[Process]) -> None:
    async def run() -> None:
        supervisor = Supervisor(make_options("demo", max_restarts=1, **SHARED), "/model")
        await supervisor.start()
        Process.unlaunchable += [1]
        made[0].death.set_result(EngineDeath(EngineDead("it died"), "killed"))
        await replace(supervisor, made, 7)  # one of the group was launched in vain
        assert made[3].stopped and supervisor.replicas.first_cause == "it cannot be launched"
        await supervisor.stop()

    asyncio.run(run())


def test_what_was_launched_ends_if_another_engine_cannot_be(made: list[Process]) -> None:
    async def run() -> None:
        Process.unlaunchable += [1]
        supervisor = Supervisor(make_options("demo", data_parallel_size=2), "/model")
        with pytest.raises(CapacityError, match="it cannot be launched"):
            await supervisor.start()
        await supervisor.stop()
        assert [process.stopped for process in made] == [True]

    asyncio.run(run())


def test_no_engine_continues_requests_with_another_checkpoint(made: list[Process], tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"

    async def run() -> None:
        weights.touch()
        supervisor = Supervisor(make_options("demo", **SCALABLE), str(tmp_path))
        await supervisor.start()
        weights.write_bytes(b"other")
        with pytest.raises(ModelError, match="has changed since the server started"):
            await supervisor.add_engines(2)
        made[0].death.set_result(RANK)
        error = await asyncio.wait_for(supervisor.watch(), 10)
        assert isinstance(error, ModelError) and "(model.safetensors), so a new engine would serve" in str(error)
        assert len(made) == 1
        await supervisor.stop()

    asyncio.run(run())


def test_other_engines_serve_on_until_the_checkpoint_is_back(
    made: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (weights := tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(supervisor, "CHANGED_POLL_SECONDS", 0.0)
    stat = weights.stat()

    async def run() -> None:
        supervisor = Supervisor(make_options("demo", data_parallel_size=2), str(tmp_path))
        await supervisor.start()
        weights.write_bytes(b"other")
        made[0].death.set_result(RANK)
        while "the other engines serve on" not in caplog.text:
            await asyncio.sleep(0)
        assert supervisor.replicas.ready and len(made) == 2
        weights.write_bytes(b"")
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        await replace(supervisor, made, 3)
        await supervisor.stop()

    asyncio.run(run())


def test_the_loss_of_a_host_blames_no_request(made: list[Process], blamed: list[Mapping[int, Collection[int]]]) -> None:
    """Its requests may run on an engine that is lost with the same host a moment later."""

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


@pytest.mark.parametrize("last", [LOST, None], ids=["all engines", "all but one"])
def test_lost_connections_alone_blame_no_request(
    made: list[Process],
    blamed: list[Mapping[int, Collection[int]]],
    monkeypatch: pytest.MonkeyPatch,
    last: EngineDeath | None,
) -> None:
    """The first cause is unknown if all have died, or if the others still live after SETTLE_SECONDS."""
    if last is None:
        monkeypatch.setattr(supervisor, "SETTLE_SECONDS", 0.01)

    async def run() -> None:
        supervisor = Supervisor(make_options("demo", **SHARED), "/model")
        await supervisor.start()
        for index, death in enumerate((LOST, LOST, last)):
            if death:
                made[index].death.set_result(death)
            await asyncio.sleep(0)
        await replace(supervisor, made, 6)
        assert supervisor.replicas.first_cause == "engine 0: heard nothing"
        await supervisor.stop()

    asyncio.run(run())
    assert blamed == [{0: (), 1: (), 2: ()}]


def test_a_replacement_computes_on_the_same_kind_of_device(made: list[Process]) -> None:
    """With `--device auto`, it would use the CPU if the GPUs were lost."""

    async def run() -> None:
        supervisor = Supervisor(make_options("demo", data_parallel_max=2), "/model")
        made[0].client.model_info = make_model_info(device="cuda")
        await supervisor.start()
        await supervisor.add_engines(2)
        made[0].death.set_result(RANK)
        await replace(supervisor, made, 3)
        assert [process.device for process in made] == ["auto", "cuda", "cuda"]
        await supervisor.stop()

    asyncio.run(run())


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


SCALABLE = {"data_parallel_max": 3, "max_restarts": 1}


def test_engines_are_added_and_removed_while_others_serve(made: list[Process]) -> None:
    async def run() -> None:
        supervisor = Supervisor(make_options("demo", **SCALABLE), "/model")
        await supervisor.start()
        await supervisor.add_engines(3)
        assert [process.index for process in made] == [0, 1, 2] and supervisor.num_engines == 3
        assert [process.replaces for process in made] == [False, True, True], "they start alone"
        replicas = supervisor.replicas
        assert all(engine.ready for engine in replicas.engines)

        made[1].death.set_result(RANK)  # an added engine is replaced like any other
        await replace(supervisor, made, 4)
        assert made[3].index == 1

        requests = [
            EngineCoreRequest(id=n, prompt_ids=[n], sampling=Sampling(max_tokens=2, seed=0)) for n in (101, 102, 103)
        ]
        tracked = replicas.submit_many([(request, lambda output: None) for request in requests])
        assert sorted(one.engine for one in tracked) == [0, 1, 2]
        removing = asyncio.ensure_future(supervisor.remove_engine(60.0))
        while not replicas.engines[2].is_draining:
            await asyncio.sleep(0)
        assert not made[2].stopped and replicas.count_open(2) == 1
        for _ in range(2):
            made[2].client.step()
        await asyncio.wait_for(removing, 10)
        assert made[2].stopped and supervisor.num_engines == 2 and len(replicas.active) == 2

        await supervisor.remove_engine(0.0)  # its request has not ended
        assert made[3].stopped and len(made[0].client.open) == 2, "it goes on on the last engine"
        await supervisor.add_engines(2)
        assert [process.index for process in made] == [0, 1, 2, 1, 1]
        await supervisor.stop()

    asyncio.run(run())


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_an_engine_serves_on_until_another_one_does(
    made: list[Process], monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """An old engine keeps serving until a new one does, unless that takes longer than the drain timeout."""
    monkeypatch.setattr(supervisor, "DRAIN_POLL_SECONDS", 0.0)

    async def run() -> None:
        supervisor = Supervisor(make_options("demo", data_parallel_size=2, data_parallel_min=1), "/model")
        await supervisor.start()
        monkeypatch.setattr(Process, "may_start", asyncio.Event())
        made[0].death.set_result(RANK)
        while len(made) < 3:
            await asyncio.sleep(0)
        removing = asyncio.ensure_future(supervisor.remove_engine(seconds))
        for _ in range(20):
            await asyncio.sleep(0)
        assert supervisor.replicas.engines[1].accepts == (not removing.done()) == bool(seconds)
        assert Process.may_start is not None
        Process.may_start.set()
        await asyncio.wait_for(removing, 10)
        while not supervisor.replicas.engines[0].ready:
            await asyncio.sleep(0)
        assert supervisor.num_engines == 1 and made[1].stopped and not made[2].stopped
        await supervisor.stop()

    asyncio.run(run())


def test_an_engine_that_cannot_be_added_leaves_the_others_alone(made: list[Process]) -> None:
    async def run() -> None:
        supervisor = Supervisor(make_options("demo", **SCALABLE), "/model")
        await supervisor.start()
        Process.broken.append(2)
        with pytest.raises(EngineDead, match="it did not come up"):
            await supervisor.add_engines(3)
        assert supervisor.num_engines == 1 and [process.stopped for process in made] == [False, True, True]
        await supervisor.add_engines(3)
        assert len(supervisor.replicas.active) == 3
        await supervisor.stop()

    asyncio.run(run())


def test_an_engine_that_dies_while_it_drains_is_not_replaced(made: list[Process]) -> None:
    async def run() -> None:
        supervisor = Supervisor(
            make_options("demo", data_parallel_size=2, data_parallel_min=1, max_restarts=0), "/model"
        )
        await supervisor.start()
        requests = [
            EngineCoreRequest(id=n, prompt_ids=[n], sampling=Sampling(max_tokens=2, seed=0)) for n in (101, 102)
        ]
        supervisor.replicas.submit_many([(request, lambda output: None) for request in requests])
        removing = asyncio.ensure_future(supervisor.remove_engine(60.0))
        while not supervisor.replicas.engines[1].is_draining:
            await asyncio.sleep(0)
        made[1].death.set_result(RANK)
        await asyncio.wait_for(removing, 10)
        assert len(made) == 2 and len(made[0].client.open) == 2

        watching = asyncio.ensure_future(supervisor.watch())
        made[0].death.set_result(RANK)  # the removal does not hide the cause that ends the server
        assert "a rank failed" in str(await asyncio.wait_for(watching, 10))
        await supervisor.stop()

    asyncio.run(run())
