"""The queue, deadlines and keys over HTTP, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from serve_llm.engine.errors import EngineDead
from serve_llm.server.replicas import Replicas
from support.asgi import Call
from support.fakes import ScriptedEngine
from support.serving import Served

Serve = Callable[..., Served]


async def submitted(served: Served, count: int) -> None:
    while len(served.engine.submitted) < count:
        served.engine.changed.clear()
        await served.engine.changed.wait()


def post(served: Served, key: str = "", headers: dict[str, str] | None = None, **body: object) -> Call:
    given = {"authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": "x", "temperature": 0, "max_tokens": 3} | body
    return Call(served.app, "POST", "/v1/completions", body, given | (headers or {}))


def test_a_full_queue_is_answered_with_503(serve: Serve) -> None:
    served = serve(automatic=False, options={"max_queue": "2"})

    async def scenario() -> None:
        first = [post(served), post(served)]
        await submitted(served, 2)
        refused = await post(served).reply()
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert "the queue is full" in refused.json()["error"]["message"]
        served.engine.step()  # both have their first token: they wait no longer
        third = post(served)
        await submitted(served, 3)
        for _ in range(3):
            served.engine.step()
        assert [(await call.reply()).status for call in (*first, third)] == [200] * 3

    asyncio.run(scenario())
    assert served.gate.num_open == served.gate.num_requests == served.gate.num_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_heavy_key_makes_room_for_a_light_one(serve: Serve, stream: bool) -> None:
    served = serve(automatic=False, options={"max_queue": "3", "api_key": ("heavy", "light")})

    async def scenario() -> None:
        heavy = [post(served, "heavy", stream=stream) for _ in range(3)]
        await submitted(served, 3)
        light = post(served, "light", stream=stream)
        await submitted(served, 4)
        evicted = await heavy[2].reply()
        assert evicted.status == 503 and evicted.headers["retry-after"], "it was the newest, and had sent nothing"
        assert served.engine.aborted == [3]
        assert [one.tenant for one in served.engine.submitted] == [0, 0, 0, 1]
        for _ in range(3):
            served.engine.step()
        assert [(await call.reply()).status for call in (*heavy[:2], light)] == [200] * 3

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by", ["option", "header"])
def test_a_deadline_that_passes_ends_the_request(serve: Serve, stream: bool, by: str) -> None:
    served = serve(automatic=False, options={"request_timeout": 0.05 if by == "option" else 60})
    headers = {"x-request-timeout": "0.05"} if by == "header" else {}

    async def scenario() -> None:
        call = post(served, headers=headers, stream=stream, max_tokens=50)
        await submitted(served, 1)
        served.engine.step()
        reply = await call.reply()
        if stream:
            assert reply.status == 200
            error = reply.events()[-1]["error"]
        else:
            assert reply.status == 504
            error = reply.json()["error"]
        assert error["code"] == "deadline_exceeded" and "took longer" in error["message"]
        assert served.engine.aborted == [1]

    asyncio.run(scenario())
    assert served.gate.num_open == 0


@pytest.mark.parametrize("given", ["0", "-1", "x", "", "nan", "inf", "1e9", "1" * 40, "1 2"])
def test_a_limit_that_is_no_number_is_refused(served: Served, given: str) -> None:
    reply = served.post("/v1/completions", {"prompt": "x"}, {"x-request-timeout": given})
    assert reply.status == 400 and reply.json()["error"]["param"] == "X-Request-Timeout"


def test_the_end_of_draining_is_every_streams_last_event(serve: Serve) -> None:
    served = serve(automatic=False)

    async def scenario() -> None:
        calls = [post(served, stream=stream, max_tokens=50) for stream in (True, False)]
        await submitted(served, 2)
        served.engine.step()
        while not calls[0].sent:
            await asyncio.sleep(0)
        served.gate.draining = True
        served.gate.end_open()
        stream, whole = [await call.reply() for call in calls]
        assert stream.status == 200 and "shutting down" in stream.events()[-1]["error"]["message"]
        assert whole.status == 503 and "shutting down" in whole.json()["error"]["message"]
        await served.gate.drained()

    asyncio.run(scenario())


def kill(replicas: Replicas, engine: ScriptedEngine) -> ScriptedEngine:
    """As `server.supervise` does it. Returns the one to take its place."""
    engine.ready = False
    replicas.lose({0: []}, EngineDead("it died"))
    replicas.num_restarts, replicas.first_cause = replicas.num_restarts + 1, "it died"
    return ScriptedEngine(engine.script, automatic=False)


def test_what_waits_counts_once_however_many_engines_compute_it(serve: Serve) -> None:
    served = serve(automatic=False)
    gate, replicas = served.gate, served.gate._replicas

    async def scenario() -> None:
        begun = post(served, max_tokens=6)
        await submitted(served, 1)
        served.engine.step()
        waiting = post(served, max_tokens=6, n=2, temperature=1)
        await submitted(served, 3)
        assert gate.num_requests == 2
        engine = kill(replicas, served.engine)
        assert gate.num_requests == 2 and (await post(served).reply()).status == 503
        status = (await Call(served.app, "GET", "/status").reply()).json()
        assert (status["phase"], status["restarts"], status["first_cause"]) == ("recovering", 1, "it died")
        replicas.join({0: engine})
        assert gate.num_requests == 2 and len(engine.open) == 3
        engine.step()
        assert gate.num_requests == gate.num_tokens == 0 and gate.num_open == 2
        again = kill(replicas, engine)
        replicas.join({0: again})
        assert [len(request.output_ids) for request in again.submitted] == [2, 1, 1]
        while again.open:
            again.step()
        assert [(await call.reply()).status for call in (begun, waiting)] == [200, 200]

    asyncio.run(scenario())
    assert gate.num_open == gate.num_requests == gate.num_tokens == 0


@pytest.mark.parametrize("has_begun", [False, True])
def test_who_waits_for_an_engine_waits_no_longer_than_its_deadline(serve: Serve, has_begun: bool) -> None:
    served = serve(automatic=False, options={"request_timeout": 0.2})
    replicas = served.gate._replicas

    async def scenario() -> None:
        call = post(served, max_tokens=50)
        await submitted(served, 1)
        if has_begun:
            served.engine.step()
        engine = kill(replicas, served.engine)
        reply = await call.reply()
        assert reply.status == 504 and "it died" in reply.json()["error"]["message"]
        replicas.join({0: engine})
        assert not engine.submitted and served.gate.num_open == served.gate.num_requests == 0

    asyncio.run(scenario())


def test_a_drain_waits_for_what_another_engine_goes_on_with(serve: Serve) -> None:
    served = serve(automatic=False)

    async def scenario() -> None:
        call = post(served, max_tokens=3)
        await submitted(served, 1)
        served.engine.step()
        engine = kill(served.gate._replicas, served.engine)
        served.gate.draining = True
        drained = asyncio.ensure_future(served.gate.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        served.gate._replicas.join({0: engine})
        while engine.open:
            engine.step()
        assert (await call.reply()).status == 200
        await drained

    asyncio.run(scenario())
