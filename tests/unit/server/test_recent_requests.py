"""GET /requests: the open requests and the latest ended ones, of all clients and front ends, without any text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from serve_llm.common.errors import EngineDead
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason, Sampling
from serve_llm.server.admission.recent_requests import MAX_REQUESTS, RecentRequests, RequestLabel
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.engines.tracked_request import TrackedRequest
from serve_llm.server.metrics.meter import Clock, Meter
from support.asgi import Call
from support.fakes import ScriptedEngine
from support.front_ends import find_replicas, link
from support.serving import Served

Serve = Callable[..., Served]
SECRET = "hunter2"
PHASES = ("queue_time_ms", "prefill_time_ms", "decode_time_ms")


def read(served: Served, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.get("/requests", headers).json()["requests"]
    return found


async def read_now(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = (await Call(served.app, "GET", "/requests").reply()).json()
    return found


def test_requests_of_every_route_and_key(serve: Serve) -> None:
    served = serve("one two three", options={"api_key": ("first", "second")})
    keys = [{"authorization": f"Bearer {key}"} for key in ("first", "second")]
    assert served.get("/requests").status == 401
    assert read(served, keys[0]) == []
    usage = served.post("/v1/completions", {"prompt": ["a b", "c"], "n": 2, "max_tokens": 2}, keys[0]).json()["usage"]
    named = keys[1] | {"x-request-id": "mine"}
    messages = [{"role": "user", "content": "hi"}]
    served.post("/v1/chat/completions", {"messages": messages, "stop": "three"}, named)
    assert served.post("/v1/completions", {"prompt": "x", "n": 0}, keys[0]).status == 400
    chat, completion = read(served, keys[1])
    assert (chat["id"], chat["route"], chat["key"], chat["outcome"]) == ("mine", "/v1/chat/completions", 1, "stop")
    assert (completion["route"], completion["key"], completion["outcome"]) == ("/v1/completions", 0, "length")
    assert (completion["num_choices"], completion["model"], completion["engines"]) == (4, "demo", [0])
    assert completion["prompt_tokens"] == usage["prompt_tokens"]
    assert completion["generated_tokens"] == usage["completion_tokens"] == 8
    assert all(request[phase] >= 0 for request in (chat, completion) for phase in PHASES)
    assert chat["time"] >= completion["time"] > 1e9 and chat["replays"] == 0


def test_no_text_and_no_key(serve: Serve) -> None:
    served = serve(SECRET * 3, options={"api_key": SECRET})
    key = {"authorization": f"Bearer {SECRET}"}
    message = {"role": "user", "content": SECRET, "name": SECRET}
    body = {
        "messages": [message],
        "stop": [SECRET, "2h"],
        "user": SECRET,
        "cache_salt": SECRET,
        "metadata": {"a": SECRET},
        "response_format": {"type": "json_schema", "json_schema": {"name": SECRET, "schema": {"const": SECRET}}},
        "max_tokens": 9,
    }
    served.post("/v1/chat/completions", body, key)
    served.post("/v1/completions", {"prompt": SECRET, "max_tokens": 9, "stop": SECRET}, key)
    reply = served.get("/requests", key)
    assert len(reply.json()["requests"]) == 2 and SECRET not in reply.content.decode()


def test_a_request_from_the_queue_to_its_end(serve: Serve) -> None:
    async def run() -> None:
        served = serve("one two three four", automatic=False)
        call = Call(served.app, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 3, "stream": True})
        while not served.engine.open:
            await asyncio.sleep(0)
        found = await read_now(served)
        (waiting,) = found["requests"]
        assert found["num_open"] == 1 and waiting["outcome"] is None and waiting["queue_time_ms"] > 0
        assert waiting["prefill_time_ms"] is None and waiting["decode_time_ms"] is None
        served.engine.step()
        (running,) = (await read_now(served))["requests"]
        assert running["generated_tokens"] == 1 and running["outcome"] is None
        assert running["prefill_time_ms"] >= 0 and running["decode_time_ms"] >= 0
        for _ in range(2):
            served.engine.step()
        await call.reply()
        found = await read_now(served)
        (ended,) = found["requests"]
        assert found["num_open"] == 0 and (ended["outcome"], ended["generated_tokens"]) == ("length", 3)
        assert ended["decode_time_ms"] >= running["decode_time_ms"]

    asyncio.run(run())


def test_a_client_that_leaves(serve: Serve) -> None:
    async def run() -> None:
        served = serve(automatic=False)
        call = Call(served.app, "POST", "/v1/completions", {"prompt": "x", "stream": True})
        while not served.engine.open:
            await asyncio.sleep(0)
        call.leave()
        await call.finished
        (left,) = (await read_now(served))["requests"]
        assert (left["outcome"], left["generated_tokens"], left["prefill_time_ms"]) == ("abort", 0, None)

    asyncio.run(run())


def test_a_client_that_leaves_when_all_is_computed(serve: Serve) -> None:
    """Every HTTP connection seems to disconnect once a response is sent."""

    async def run() -> None:
        served = serve("one two three four", automatic=False)
        call = Call(served.app, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1})
        while not served.engine.open:
            await asyncio.sleep(0)
        served.engine.step()
        call.leave()
        await call.finished
        (ended,) = (await read_now(served))["requests"]
        assert ended["outcome"] == "length" and served.admission.pace.num_whole == 1

    asyncio.run(run())


def test_replays_and_errors() -> None:
    async def run() -> None:
        engines = [ScriptedEngine(lambda request: [7] * 9, automatic=False) for _ in range(2)]
        replicas = Replicas(engines)
        recent = RecentRequests(replicas.clock)
        sampling = Sampling(max_tokens=9, seed=1)
        request = EngineCoreRequest(id=replicas.next_id(), prompt_ids=[1, 2], sampling=sampling, tenant=3)
        tracked = replicas.submit_many([(request, lambda output: None)])
        opened = recent.open(RequestLabel("id", "/v1/completions"), 3, tracked)
        first = tracked[0].engine
        engines[first].step()
        replicas.drop_lost({first: []}, EngineDead("killed"))
        engines[1 - first].step()
        (record,) = recent.list_records()
        assert (record.num_replays, record.engines, record.generated_tokens) == (1, (1 - first,), 2)
        replicas.give_up(EngineDead("gone"))
        recent.close(opened, is_whole=False)
        recent.close(opened, is_whole=True)
        (record,) = recent.list_records()
        assert (record.outcome, record.tenant, record.prompt_tokens) == (FinishReason.ERROR, 3, 2)

    asyncio.run(run())


def make_tracked(clock: Clock) -> TrackedRequest:
    class Observer:
        def on_prompt_computed(self, tracked: TrackedRequest) -> None: ...
        def on_finish(self, tracked: TrackedRequest) -> None: ...
        def on_cleared(self, tracked: TrackedRequest) -> None: ...

    request = EngineCoreRequest(id=1, prompt_ids=[1], sampling=Sampling(max_tokens=9, seed=1))
    return TrackedRequest(request, lambda output: None, Observer(), Meter(clock))


def test_phases_add_up() -> None:
    now = 10.0
    clock = Clock(lambda: now)
    recent = RecentRequests(clock)
    tracked = make_tracked(clock)
    request = recent.open(RequestLabel(), 0, [tracked])
    now = 15.0
    clock.advance()
    tracked.receive(EngineCoreOutput(1, [7], cached_tokens=0, queued_seconds=2.0))
    now = 22.0
    clock.advance()
    tracked.receive(EngineCoreOutput(1, [7], finish_reason=FinishReason.LENGTH))
    now = 99.0  # the client reads slowly
    recent.close(request, is_whole=True)
    (record,) = recent.list_records()
    assert (record.queued, record.prefill, record.decode, record.outcome) == (2, 3, 7, "length")


def test_the_list_is_bounded_and_keeps_what_takes_long() -> None:
    recent = RecentRequests(Clock())
    slow = [recent.open(RequestLabel(f"slow {number}"), 0, [make_tracked(Clock())]) for number in range(3)]
    for number in range(2 * MAX_REQUESTS):
        recent.close(recent.open(RequestLabel(str(number)), 0, [make_tracked(Clock())]), is_whole=True)
    ids = [record.label.id for record in recent.list_records()]
    assert ids[:2] == ["199", "198"] and ids[-3:] == ["slow 2", "slow 1", "slow 0"]
    assert len(ids) == MAX_REQUESTS + 3
    for _ in range(2 * MAX_REQUESTS):
        recent.open(RequestLabel("new"), 0, [make_tracked(Clock())])
    ids = [record.label.id for record in recent.list_records()]
    assert recent.num_open == 2 * MAX_REQUESTS + len(slow)
    assert len(ids) == 2 * MAX_REQUESTS and "slow 0" in ids, "the oldest of the open ones"


def test_all_front_ends(serve: Serve) -> None:
    async def run() -> None:
        served = serve(automatic=False)
        front_ends = [link(served, number) for number in (1, 2)]
        body = {"prompt": "x", "max_tokens": 2, "n": 2}
        headers = [{"x-request-id": f"from-{number}"} for number in (1, 2)]
        calls = [
            Call(front_end.app, "POST", "/v1/completions", body, header)
            for front_end, header in zip(front_ends, headers, strict=True)
        ]
        while len(served.engine.open) < 4:
            await asyncio.sleep(0)
        found = await read_now(served)
        assert found["num_open"] == 2
        assert {(one["id"], one["route"], one["outcome"]) for one in found["requests"]} == {
            ("from-1", "/v1/completions", None),
            ("from-2", "/v1/completions", None),
        }
        front_ends[1].relay.close()  # its process has ended
        while len(served.engine.open) > 2:
            await asyncio.sleep(0)
        for _ in range(2):
            served.engine.step()
        await calls[0].reply()
        while (await read_now(served))["num_open"]:
            await asyncio.sleep(0)
        outcomes = {
            one["id"]: (one["outcome"], one["generated_tokens"]) for one in (await read_now(served))["requests"]
        }
        assert outcomes == {"from-1": ("length", 4), "from-2": ("abort", 0)}
        calls[1].leave()
        await calls[1].finished

    asyncio.run(run())


def test_the_records_of_ended_requests_keep_no_prompts(serve: Serve) -> None:
    served = serve()
    served.complete(prompt="a b c")
    recent = served.admission.recent
    (record,) = recent.list_records()
    assert json.dumps(record[1:]) and isinstance(record.prompt_tokens, int)
    assert find_replicas(served)._open == {} and not recent.num_open
