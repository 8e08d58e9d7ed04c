"""The queue, deadlines and API keys over HTTP, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from serve_llm.common.errors import EngineDead
from serve_llm.server.engines.replicas import Replicas
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


def test_a_full_queue_answers_503(serve: Serve) -> None:
    served = serve(automatic=False, options={"max_queue": "2"})

    async def scenario() -> None:
        first = [post(served), post(served)]
        await submitted(served, 2)
        refused = await post(served).reply()
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert "the queue is full" in refused.json()["error"]["message"]
        served.engine.step()  # both get their first token and no longer wait
        third = post(served)
        await submitted(served, 3)
        for _ in range(3):
            served.engine.step()
        assert [(await call.reply()).status for call in (*first, third)] == [200] * 3

    asyncio.run(scenario())
    assert served.admission.num_open == served.admission.num_waiting == served.admission.num_waiting_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_a_heavy_key_is_evicted_for_a_light_key(serve: Serve, stream: bool) -> None:
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
def test_a_request_ends_at_its_deadline(serve: Serve, stream: bool, by: str) -> None:
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
    assert served.admission.num_open == 0


def test_a_request_that_cannot_end_in_time_ends_unless_it_has_begun(serve: Serve) -> None:
    served = serve(automatic=False, options={"request_timeout": 60})
    for _ in range(50):
        served.admission.pace.count(50, 59.95, is_whole=True)  # so 0.05 s remain to start

    async def scenario() -> None:
        begun = post(served, stream=True, max_tokens=50)
        await submitted(served, 1)
        served.engine.step()
        waiting = post(served, max_tokens=50)
        reply = await waiting.reply()
        assert reply.status == 504 and "waited too long" in reply.json()["error"]["message"]
        assert served.engine.aborted == [2] and not begun.finished.done()
        begun.leave()
        await begun.finished

    asyncio.run(scenario())
    assert served.admission.num_open == served.admission.num_waiting == 0


@pytest.mark.parametrize("given", ["0", "-1", "x", "", "nan", "inf", "1e-999", "1_0", "1 2"])
def test_an_invalid_timeout_header_is_refused(served: Served, given: str) -> None:
    reply = served.post("/v1/completions", {"prompt": "x"}, {"x-request-timeout": given})
    assert reply.status == 400 and reply.json()["error"]["param"] == "X-Request-Timeout"
    assert f"not {given!r}" in reply.json()["error"]["message"]


@pytest.mark.parametrize("given", ["60", "60.", "6e1", "1e9", "1e999", "1" * 400])
def test_a_timeout_header_may_be_any_number_above_0(served: Served, given: str) -> None:
    assert served.post("/v1/completions", {"prompt": "x"}, {"x-request-timeout": given}).status == 200


def test_end_open_is_the_last_event_of_every_stream(serve: Serve) -> None:
    served = serve(automatic=False)

    async def scenario() -> None:
        calls = [post(served, stream=stream, max_tokens=50) for stream in (True, False)]
        await submitted(served, 2)
        served.engine.step()
        while not calls[0].sent:
            await asyncio.sleep(0)
        served.admission.draining = True
        served.admission.end_open()
        stream, whole = [await call.reply() for call in calls]
        assert stream.status == 200 and "shutting down" in stream.events()[-1]["error"]["message"]
        assert whole.status == 503 and "shutting down" in whole.json()["error"]["message"]
        await served.admission.drained()

    asyncio.run(scenario())


def kill(replicas: Replicas, engine: ScriptedEngine) -> ScriptedEngine:
    """Lose the engine as `server.engines.supervisor` does. Returns its replacement."""
    engine.ready = False
    replicas.drop_lost({0: []}, EngineDead("it died"))
    replicas.num_restarts, replicas.first_cause = replicas.num_restarts + 1, "it died"
    return ScriptedEngine(engine.script, automatic=False, meter=engine.meter)


def test_replayed_requests_count_once_in_the_queue(serve: Serve) -> None:
    served = serve(automatic=False)
    admission, replicas = served.admission, served.admission._replicas

    async def scenario() -> None:
        begun = post(served, max_tokens=6)
        await submitted(served, 1)
        served.engine.step()
        waiting = post(served, max_tokens=6, n=2, temperature=1)
        await submitted(served, 3)
        assert admission.num_waiting == 2
        engine = kill(replicas, served.engine)
        assert admission.num_waiting == 2 and (await post(served).reply()).status == 503
        status = (await Call(served.app, "GET", "/status").reply()).json()
        assert (status["phase"], status["restarts"], status["first_cause"]) == ("recovering", 1, "it died")
        replicas.join({0: engine})
        assert admission.num_waiting == 2 and len(engine.open) == 3
        engine.step()
        assert admission.num_waiting == admission.num_waiting_tokens == 0 and admission.num_open == 2
        again = kill(replicas, engine)
        replicas.join({0: again})
        assert [len(request.output_ids) for request in again.submitted] == [2, 1, 1]
        while again.open:
            again.step()
        assert [(await call.reply()).status for call in (begun, waiting)] == [200, 200]

    asyncio.run(scenario())
    assert admission.num_open == admission.num_waiting == admission.num_waiting_tokens == 0


def test_a_request_that_no_engine_takes_leaves_the_queue(served: Served) -> None:
    served.admission._replicas.give_up(EngineDead("it died too often"))
    reply = served.complete()
    assert reply.status == 503 and "it died too often" in reply.json()["error"]["message"]
    assert served.admission.num_open == served.admission.num_waiting == served.admission.num_waiting_tokens == 0


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_that_waits_for_an_engine_ends_at_its_deadline(serve: Serve, has_begun: bool) -> None:
    served = serve(automatic=False, options={"request_timeout": 0.2})
    replicas = served.admission._replicas

    async def scenario() -> None:
        call = post(served, max_tokens=50)
        await submitted(served, 1)
        if has_begun:
            served.engine.step()
        engine = kill(replicas, served.engine)
        reply = await call.reply()
        assert reply.status == 504 and "it died" in reply.json()["error"]["message"]
        replicas.join({0: engine})
        assert not engine.submitted and served.admission.num_open == served.admission.num_waiting == 0

    asyncio.run(scenario())


def test_draining_waits_for_replayed_requests(serve: Serve) -> None:
    served = serve(automatic=False)

    async def scenario() -> None:
        call = post(served, max_tokens=3)
        await submitted(served, 1)
        served.engine.step()
        engine = kill(served.admission._replicas, served.engine)
        served.admission.draining = True
        drained = asyncio.ensure_future(served.admission.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        served.admission._replicas.join({0: engine})
        while engine.open:
            engine.step()
        assert (await call.reply()).status == 200
        await drained

    asyncio.run(scenario())
