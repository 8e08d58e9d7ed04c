"""Front ends without processes: their responses, what the server knows about them, and what is left when one is
gone."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serve_llm.common.errors import EngineDead, OptionError
from serve_llm.common.options.sources import make_options
from serve_llm.server.assemble import assemble
from serve_llm.server.front_ends import front_end as module
from serve_llm.server.front_ends import messages
from serve_llm.server.front_ends.channel import MessageChannel
from serve_llm.server.front_ends.front_end import FrontEnd
from serve_llm.server.metrics.meter import Clock, Meter
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import PromptPool
from serve_llm.server.tracing.tracing import Tracing
from support.asgi import Call, fetch
from support.fakes import ScriptedEngine
from support.front_ends import LinkedFrontEnd, find_replicas, link
from support.serving import TEXT, Served

Serve = Callable[..., Served]
BODY = {"prompt": ["x", "def"], "n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 7, "logprobs": 1}
EMPTY = Meter(Clock()).take()


def complete(front_end: LinkedFrontEnd, headers: dict[str, str] | None = None, **body: object) -> Call:
    given = {"prompt": "x", "temperature": 0, "max_tokens": 3} | body
    return Call(front_end.app, "POST", "/v1/completions", given, headers)


async def submitted(served: Served, count: int) -> None:
    while len(served.engine.submitted) < count:
        served.engine.changed.clear()
        await served.engine.changed.wait()


@pytest.mark.parametrize("stream", [False, True])
def test_a_front_end_answers_as_the_server_itself(serve: Serve, stream: bool) -> None:
    served = serve(num_engines=2)
    front_end = link(served)
    answers = [fetch(app, "POST", "/v1/completions", BODY | {"stream": stream}) for app in (served.app, front_end.app)]
    contents = [
        [event["choices"] for event in answer.events()] if stream else answer.json()["choices"] for answer in answers
    ]
    assert contents[0] == contents[1] and answers[1].status == 200
    assert served.admission.num_open == front_end.relay.num_open == front_end.dispatcher.num_open == 0
    first, second = ([one.prompt_ids for one in engine.submitted] for engine in served.engines)
    assert len(first) == len(second) == 4, "the choices of a prompt went to one engine"


def test_what_a_front_end_counts_is_added_to_the_servers_metrics(serve: Serve) -> None:
    served = serve(num_engines=2)
    front_end = link(served)
    fetch(served.app, "POST", "/v1/completions", BODY)
    alone = served.get("/metrics").content.decode()
    fetch(front_end.app, "POST", "/v1/completions", BODY)
    replicas = find_replicas(served)
    for replica, meter in zip(replicas.engines, front_end.dispatcher.meters, strict=True):
        replica.meter.add(meter.take())
        assert meter.take() == EMPTY
    both = served.get("/metrics").content.decode()
    name = "serve_llm_generation_tokens_total"
    assert sum_samples(alone, name) == 28 and sum_samples(both, name) == 56
    for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_params_n"):
        count = f"serve_llm_{histogram}_count"
        assert sum_samples(both, count) == 2 * sum_samples(alone, count) > 0
    finished = "serve_llm_request_success_total"
    assert sum_samples(both, finished) == 2 * sum_samples(alone, finished) == 8


def sum_samples(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def test_the_queue_is_one_for_all_front_ends(serve: Serve) -> None:
    served = serve(automatic=False, options={"max_queue": "3"})
    front_ends = [link(served, 1), link(served, 2)]

    async def scenario() -> None:
        calls = [complete(front_ends[0]), complete(front_ends[1]), complete(front_ends[0])]
        await submitted(served, 3)
        refused = [complete(front_end, stream=stream) for front_end in front_ends for stream in (False, True)]
        for call in refused:
            reply = await call.reply()
            assert reply.status == 503 and "the queue is full" in reply.json()["error"]["message"]
            assert int(reply.headers["retry-after"]) >= 1
        for _ in range(3):
            served.engine.step()
            await asyncio.sleep(0)
        assert [(await call.reply()).status for call in calls] == [200] * 3

    asyncio.run(scenario())
    assert served.admission.refused["queue_full"] == 4
    meters = [front_end.dispatcher.meters[0] for front_end in front_ends]
    assert [sum(meter.finished.values()) for meter in meters] == [2, 1], "refused requests did not begin"
    assert served.admission.num_open == served.admission.num_waiting == 0


def test_a_key_with_much_work_makes_room_in_another_front_end(serve: Serve) -> None:
    options: dict[str, object] = {"max_queue": "3", "api_key": ("heavy", "light")}
    served = serve(automatic=False, options=options)
    first, second = (link(served, number, options) for number in (1, 2))

    async def scenario() -> None:
        heavy = [complete(first, {"authorization": "Bearer heavy"}) for _ in range(3)]
        await submitted(served, 3)
        light = complete(second, {"authorization": "Bearer light"})
        await submitted(served, 4)
        assert (await heavy[2].reply()).status == 503
        for _ in range(3):
            served.engine.step()
            await asyncio.sleep(0)
        assert [(await call.reply()).status for call in (*heavy[:2], light)] == [200] * 3

    asyncio.run(scenario())


def test_the_requests_of_a_front_end_that_is_gone_are_aborted(serve: Serve) -> None:
    served = serve(automatic=False)
    lost, other = link(served, 1), link(served, 2)

    async def scenario() -> None:
        calls = [complete(lost, stream=True, max_tokens=9), complete(lost), complete(other, max_tokens=9)]
        await submitted(served, 3)
        served.engine.step()
        lost.relay.close()
        assert len(served.engine.aborted) == 2 and served.admission.num_open == 1
        while served.engine.open:
            served.engine.step()
        assert (await calls[2].reply()).status == 200
        for call in calls[:2]:
            call.leave()
            await call.finished

    asyncio.run(scenario())
    assert served.admission.num_waiting == 0


def test_a_client_that_leaves_a_front_end_ends_its_request(serve: Serve) -> None:
    served = serve(automatic=False)
    front_end = link(served)

    async def scenario() -> None:
        call = complete(front_end, stream=True, max_tokens=50)
        await submitted(served, 1)
        served.engine.step()
        await call.news.wait()
        call.leave()
        await call.finished
        while served.admission.num_open:
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert len(served.engine.aborted) == 1 and not served.engine.open


def test_streams_of_every_front_end_continue_on_another_engine_process(serve: Serve) -> None:
    served = serve(automatic=False)
    front_ends = [link(served, 1), link(served, 2)]
    replicas = find_replicas(served)
    expected = served.ids(TEXT)[:6]

    async def scenario() -> None:
        calls = [complete(one, stream=True, max_tokens=6, return_token_ids=True) for one in front_ends]
        await submitted(served, 2)
        served.engine.step()
        served.engine.step()
        replicas.drop_lost({0: []}, EngineDead("it died"))
        other = ScriptedEngine(served.engine.script, automatic=False, meter=served.engine.meter)
        replicas.join({0: other})
        for _ in range(4):
            other.step()
        for call, front_end in zip(calls, front_ends, strict=True):
            events = (await call.reply()).events()
            assert [one for event in events for one in event["choices"][0]["token_ids"]] == expected
            assert front_end.dispatcher.num_open == 0

    asyncio.run(scenario())


def test_spans_of_a_front_end_name_the_engines(serve: Serve) -> None:
    served = serve(automatic=False, num_engines=2)
    exporter = InMemorySpanExporter()
    front_end = link(served, tracing=Tracing(SimpleSpanProcessor(exporter)))

    async def scenario() -> None:
        call = complete(front_end)
        while not any(engine.open for engine in served.engines):
            await asyncio.sleep(0)
        (lost,) = (index for index, engine in enumerate(served.engines) if engine.open)
        served.engines[lost].step()
        while not front_end.dispatcher.meters[lost].generation_tokens:
            await asyncio.sleep(0)
        find_replicas(served).drop_lost({lost: []}, EngineDead("it died"))
        while served.engines[1 - lost].open:
            served.engines[1 - lost].step()
        assert (await call.reply()).status == 200
        spans = {span.name: dict(span.attributes or {}) for span in exporter.get_finished_spans()}
        assert spans["prefill"]["serve_llm.engines"] == (lost,) and spans["decode"]["serve_llm.engines"] == (0, 1)
        assert spans["replay"]["serve_llm.replay.from_engines"] == (lost,)
        assert spans["replay"]["serve_llm.engines"] == (1 - lost,)

    asyncio.run(scenario())


def test_a_front_end_refuses_while_the_engines_are_replaced(serve: Serve) -> None:
    served = serve()
    front_end = link(served)
    served.engine.ready = False
    front_end.update(served)
    reply = fetch(front_end.app, "POST", "/v1/completions", {"prompt": "x"})
    assert reply.status == 503 and front_end.dispatcher.refused["not_ready"] == 1


def test_messages_arrive_whole_however_they_are_cut() -> None:
    received: list[bytes] = []
    channel = MessageChannel(received.append)
    sent: list[bytes] = []

    class Transport(asyncio.Transport):
        def write(self, data: object) -> None:
            assert isinstance(data, bytes)
            sent.append(data)

    channel.connection_made(Transport())
    contents = [b"", b"x", bytes(range(256)) * 300, json.dumps({"a": 1}).encode()]
    for content in contents:
        channel.send(content)
    stream = b"".join(sent)
    for size in (1, 3, 1000, len(stream)):
        received.clear()
        for start in range(0, len(stream), size):
            channel.data_received(stream[start : start + size])
        assert received == contents


def test_several_front_ends_are_refused_where_there_is_no_server() -> None:
    with pytest.raises(OptionError, match="--front-ends"):
        asyncio.run(assemble(make_options("demo", front_ends=2)))


def test_a_prefix_has_one_home_whichever_front_end_is_asked(serve: Serve) -> None:
    served = serve(num_engines=2)
    front_ends = [link(served, number) for number in (1, 2, 3)]
    prefixes = [[1000 + number] * 64 for number in range(4)]
    for tail in range(6):
        for number, prefix in enumerate(prefixes):
            front_end = front_ends[(tail + number) % 3]
            body = {"prompt": [*prefix, 2000 + tail], "max_tokens": 1}
            assert fetch(front_end.app, "POST", "/v1/completions", body).status == 200
    homes = [{request.prompt_ids[0] for request in engine.submitted} for engine in served.engines]
    assert len(homes[0]) == len(homes[1]) == 2 and not homes[0] & homes[1]


def test_collections_skip_what_a_front_end_loaded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: order.append("frozen"))
    monkeypatch.setattr(module, "configure", lambda *given: None)
    monkeypatch.setattr(ServedModel, "load", lambda directory, options: served.model)
    monkeypatch.setattr(PromptPool, "start_first_worker", lambda pool: order.append("built"))
    monkeypatch.setattr(FrontEnd, "_send", lambda front_end, message: order.append(type(message).__name__))
    setup = messages.Setup(make_options("demo"), "demo", served.engine.model_info, 1, 1, "socket", 0, None)

    async def load() -> None:
        with socket.socket() as listener:
            front_end = FrontEnd(listener)
            front_end.channel.closed.set()
            front_end._receive(messages.encode(setup))
            while "Loaded" not in order:
                await asyncio.sleep(0)
            await front_end.run()

    asyncio.run(load())
    assert order[:3] == ["built", "frozen", "Loaded"]
