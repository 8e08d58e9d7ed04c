"""Adding and removing engines: who may do so, within which bounds, and the server's report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from serve_llm.common.errors import CapacityError
from serve_llm.server.engines.scaler import Scaler
from serve_llm.server.http.errors import Conflict, InvalidRequest
from support.fakes import FixedEngines
from support.serving import Served

OPTIONS = {"data_parallel_max": 3, "api_key": ("plain", "admin:secret")}
ADMIN = {"authorization": "Bearer admin:secret"}
OTHER = {"authorization": "Bearer plain"}


@pytest.fixture
def server(serve: Callable[..., Served]) -> Served:
    return serve(options=OPTIONS)


def test_only_administrators_scale_and_only_within_the_bounds(server: Served) -> None:
    reply = server.post("/scale", {"data_parallel_size": 2}, OTHER)
    assert (reply.status, reply.json()["error"]["code"]) == (403, "forbidden")
    for size in (0, 4):
        reply = server.post("/scale", {"data_parallel_size": size}, ADMIN)
        assert (reply.status, reply.json()["error"]["param"]) == (400, "data_parallel_size")
    assert server.post("/scale", {"data_parallel_size": 2, "drain_timeout": -1}, ADMIN).status == 400
    described = server.post("/scale", {"data_parallel_size": 1}, ADMIN).json()
    assert (described["min_engines"], described["max_engines"], described["target"]) == (1, 3, 1)


def test_without_the_option_the_error_names_it(served: Served) -> None:
    for path in ("/scale", "/scale_elastic_ep"):
        reply = served.post(path, {"data_parallel_size": 2})
        assert reply.status == 404 and "--data-parallel-max" in reply.json()["error"]["message"]
    assert served.get("/status").json()["scaling"] is None


def test_a_change_runs_in_the_background_and_excludes_another() -> None:
    class SlowEngines(FixedEngines):
        def __init__(self) -> None:
            super().__init__(1)
            self.started = asyncio.Event()

        async def add_engines(self, count: int) -> None:
            await self.started.wait()
            await super().add_engines(count)

    async def run() -> None:
        engines = SlowEngines()
        scaler = Scaler(engines, 1, 3)
        scaler.scale(3, 7.0)
        assert scaler.is_under_way and scaler.num_engines == 1 and scaler.target == 3
        scaler.scale(3, 7.0)  # repeating it changes nothing
        with pytest.raises(Conflict, match="a change to 3 engines is in progress"):
            scaler.scale(2, 7.0)
        engines.started.set()
        await finish(scaler)
        assert scaler.num_engines == 3
        scaler.scale(1, 7.0)
        await finish(scaler)
        assert scaler.num_engines == 1 and engines.drain_seconds == [7.0, 7.0]
        with pytest.raises(InvalidRequest, match="4 is not between 1"):
            scaler.scale(4, 7.0)

    asyncio.run(run())


def test_a_failure_is_told_and_the_next_change_may_succeed() -> None:
    class FullEngines(FixedEngines):
        is_full = True

        async def add_engines(self, count: int) -> None:
            if self.is_full:
                raise CapacityError("no GPU is left")
            await super().add_engines(count)

    async def run() -> None:
        engines = FullEngines(1)
        scaler = Scaler(engines, 1, 2)
        scaler.scale(2, 0.0)
        await finish(scaler)
        assert (scaler.target, scaler.error) == (1, "no GPU is left")
        engines.is_full = False
        scaler.scale(2, 0.0)
        await finish(scaler)
        assert (scaler.num_engines, scaler.error) == (2, None)

    asyncio.run(run())


async def finish(scaler: Scaler) -> None:
    async with asyncio.timeout(10):
        while scaler.is_under_way:
            await asyncio.sleep(0)
