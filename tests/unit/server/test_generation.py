"""Disconnects, slow readers and failing engines, step by step and without sockets."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable

import pytest

from serve_llm.server.engines.tracked_request import TrackedRequest
from serve_llm.server.generate.choice import Choice
from serve_llm.server.generate.generation import Generation
from serve_llm.server.generate.output import OutputProcessor
from support.asgi import Call
from support.serving import TEXT, Served

Serve = Callable[..., Served]


async def submitted(served: Served, count: int = 1) -> None:
    """Wait until `count` requests have been submitted in all."""
    while len(served.engine.submitted) < count:
        served.engine.changed.clear()
        await served.engine.changed.wait()


async def settled() -> None:
    """Wait until no task can make progress."""
    for _ in range(30):
        await asyncio.sleep(0)


def post(served: Served, path: str = "/v1/completions", **body: object) -> Call:
    return Call(served.app, "POST", path, {"prompt": "x", "temperature": 0, "max_tokens": 50} | body)


def events(call: Call) -> list[dict]:
    content = b"".join(message.get("body", b"") for message in call.sent[1:])
    return [json.loads(line[6:]) for line in content.decode().split("\n\n") if line.startswith("data: {")]


def check_nothing_left(served: Served) -> None:
    assert served.engine.open == {} and served.engine.stats.num_running == 0
    assert served.admission.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_disconnect_aborts_in_every_phase(serve: Serve, stream: bool, num_steps: int) -> None:
    served = serve(automatic=False)

    async def scenario() -> None:
        call = post(served, stream=stream, n=3)
        await submitted(served, 3)
        for _ in range(num_steps):
            served.engine.step()
            await settled()
        call.leave()
        await settled()
        assert sorted(served.engine.aborted) == [1, 2, 3], "before the next step"
        await call.finished
        assert bool(call.sent) == (stream and num_steps > 0)

    asyncio.run(scenario())
    check_nothing_left(served)
    assert "request_success_total" in served.get("/metrics").content.decode()
    assert sample(served, "request_success_total", 'finished_reason="abort"') == 3


def test_a_disconnect_during_tokenization_leaves_nothing_open(serve: Serve) -> None:
    served = serve(automatic=False)

    async def scenario() -> None:
        call = post(served, prompt="word " * 1200)
        call.leave()
        await call.finished
        assert call.sent == []

    asyncio.run(scenario())
    check_nothing_left(served)


def test_a_disconnect_does_not_disturb_other_streams(serve: Serve) -> None:
    served = serve("ab cd ef gh", automatic=False)
    size = len(served.ids("ab cd ef gh"))

    async def scenario() -> None:
        calls = [post(served, stream=True, max_tokens=size) for _ in range(4)]
        await submitted(served, 4)
        for number in range(size):
            served.engine.step()
            await settled()
            if number == 2:
                calls[1].leave()
                await settled()
        for number in (0, 2, 3):
            await calls[number].finished
            assert "".join(event["choices"][0]["text"] for event in events(calls[number])) == "ab cd ef gh"
        await calls[1].finished

    asyncio.run(scenario())
    assert len(served.engine.aborted) == 1
    check_nothing_left(served)


def test_a_slow_reader_gets_pending_text_in_one_event(serve: Serve) -> None:
    served = serve("one two three four five six", automatic=False)
    size = len(served.ids("one two three four five six"))

    async def scenario() -> None:
        call = post(served, stream=True, max_tokens=size)
        await submitted(served)
        served.engine.step()
        await settled()
        call.may_send.clear()
        for _ in range(size - 2):
            served.engine.step()
            await settled()
        num_sent = len(call.sent)
        call.may_send.set()
        await settled()
        assert len(call.sent) == num_sent + 2, "the event that waited to be sent, and one with all the others"
        served.engine.step()
        await call.finished
        assert "".join(event["choices"][0]["text"] for event in events(call)) == "one two three four five six"

    asyncio.run(scenario())
    check_nothing_left(served)


def test_no_event_is_sent_for_an_incomplete_character(serve: Serve) -> None:
    served = serve("\U0001f600", automatic=False)
    size = len(served.ids("\U0001f600"))

    async def scenario() -> None:
        call = post(served, stream=True, max_tokens=size + 1)
        await submitted(served)
        for _ in range(size):
            served.engine.step()
            await settled()
        texts = [event["choices"][0]["text"] for event in events(call)]
        assert "".join(texts) == "\U0001f600" and len(texts) <= 2
        call.leave()
        await call.finished

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_failure_before_the_first_token_is_an_error_status(serve: Serve, stream: bool, path: str) -> None:
    served = serve(automatic=False)
    body: dict[str, object] = {"prompt": "x"}
    if "chat" in path:
        body = {"messages": [{"role": "user", "content": "x"}]}

    async def scenario() -> None:
        call = Call(served.app, "POST", path, body | {"stream": stream, "n": 2})
        await submitted(served, 2)
        served.engine.fail("out of memory on rank 0")
        reply = await call.reply()
        assert reply.status == 500 and reply.json()["error"]["type"] == "server_error"
        assert "out of memory on rank 0" in reply.json()["error"]["message"]

    asyncio.run(scenario())
    check_nothing_left(served)
    assert sample(served, "request_success_total", 'finished_reason="error"') == 2
    assert served.complete().status == 503


def test_an_engine_failure_in_a_stream_is_its_last_event(serve: Serve) -> None:
    served = serve("ab cd", automatic=False)

    async def scenario() -> None:
        call = post(served, stream=True)
        await submitted(served)
        served.engine.step()
        await settled()
        served.engine.step()
        served.engine.fail("gone")  # arrives with the second token, which must not be lost
        reply = await call.reply()
        assert reply.status == 200
        *texts, last = reply.events()
        expected = served.model.tokenizer.decode(served.ids("ab cd")[:2])
        assert "".join(event["choices"][0]["text"] for event in texts) == expected
        assert last["error"]["message"] == "gone" and last["error"]["code"] == "generation_failed"

    asyncio.run(scenario())
    check_nothing_left(served)


def test_an_exception_in_one_stream_does_not_affect_others(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve("ab cd", automatic=False)
    push = OutputProcessor.push
    broken: list[OutputProcessor] = []

    def push_or_break(self: OutputProcessor, output) -> int:
        broken.append(self)
        if self is broken[0]:
            raise ZeroDivisionError
        return push(self, output)

    monkeypatch.setattr(OutputProcessor, "push", push_or_break)

    async def scenario() -> None:
        calls = [post(served, max_tokens=2) for _ in range(2)]
        await submitted(served, 2)
        served.engine.step()
        served.engine.step()
        assert [(await call.reply()).status for call in calls] == [500, 200]

    asyncio.run(scenario())
    check_nothing_left(served)


def test_draining_waits_for_open_requests(serve: Serve) -> None:
    served = serve(automatic=False)

    async def scenario() -> None:
        call = post(served, max_tokens=2)
        await submitted(served)
        served.admission.draining = True
        draining: Awaitable[None] = asyncio.ensure_future(served.admission.drained())
        refused = await post(served).reply()
        assert refused.status == 503
        served.engine.step()
        await settled()
        assert not draining.done() and served.admission.num_open == 1
        served.engine.step()
        await draining
        assert (await call.reply()).status == 200

    asyncio.run(scenario())


def test_cancelling_the_response_aborts_the_request(serve: Serve) -> None:
    """The HTTP server cancels open requests like this when it must stop at once."""
    served = serve(automatic=False)

    async def scenario() -> None:
        call = post(served, stream=True)
        await submitted(served)
        served.engine.step()
        await settled()
        call.finished.cancel()
        await asyncio.gather(call.finished, return_exceptions=True)
        assert served.engine.aborted == [1]
        assert len(asyncio.all_tasks()) == 1, "nothing else runs on"

    asyncio.run(scenario())
    check_nothing_left(served)


def sample(served: Served, name: str, label: str = "") -> float:
    """Return one sample of /metrics."""
    lines = served.get("/metrics").content.decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"serve_llm_{name}{{") and label in line]
    return float(line.rpartition(" ")[2])


def test_usage_and_metrics_agree(serve: Serve) -> None:
    served = serve(TEXT, cached_tokens=1)
    usages = [
        served.complete(prompt=["ab cd", "x"], n=2, max_tokens=7).json()["usage"],
        served.complete(prompt="ab", stop="h\u00e9", max_tokens=40).json()["usage"],
        served.complete(prompt="ab", max_tokens=0, echo=True).json()["usage"],
        served.complete(stream=True, stream_options={"include_usage": True}).events()[-1]["usage"],
        served.chat(max_tokens=3, stream=True, stream_options={"include_usage": True}).events()[-1]["usage"],
    ]
    prompt = sum(usage["prompt_tokens"] for usage in usages)
    completion = sum(usage["completion_tokens"] for usage in usages)
    assert sample(served, "prompt_tokens_total") == sample(served, "request_prompt_tokens_sum") == prompt
    assert sample(served, "generation_tokens_total") == sample(served, "request_generation_tokens_sum") == completion
    assert sample(served, "request_success_total", '"length"') == 7
    assert sample(served, "request_success_total", '"stop"') == 1
    assert sample(served, "e2e_request_latency_seconds_count") == 8
    assert sample(served, "time_to_first_token_seconds_count") == 8
    assert sample(served, "request_queue_time_seconds_count") == 8
    assert sample(served, "inter_token_latency_seconds_count") == completion - 7  # all except the first of each choice
    assert sample(served, "num_requests_running") == sample(served, "kv_cache_usage_perc") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_needs_no_garbage_collection(serve: Serve, stream: bool) -> None:
    served = serve()

    async def scenario() -> None:
        for _ in range(3):
            await post(served, stream=stream, n=2).finished

    def count() -> int:
        return sum(type(one) in (Generation, Choice, TrackedRequest) for one in gc.get_objects())

    gc.collect()
    num_before = count()  # those of earlier tests
    gc.disable()
    try:
        asyncio.run(scenario())
        num_after = count()
    finally:
        gc.enable()
    assert num_after == num_before
