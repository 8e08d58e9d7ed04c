"""Streams of Messages and Responses while nothing is generated, and without the middleware, on a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from serve_llm.common.types import EngineCoreOutput, FinishReason
from serve_llm.server.http.body_writer import BODY_WRITER
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.response.messages import MessageEncoder
from serve_llm.server.response.responses import ResponsesEncoder
from support.agent_events import fold_message, fold_response, read_events, strip_message, strip_response
from support.asgi import Call
from support.serving import Served
from support.tools import with_tools

Serve = Callable[..., Served]
Json = dict[str, Any]
BODIES: dict[str, Json] = {
    "/v1/messages": {"max_tokens": 300, "messages": [{"role": "user", "content": "Hello"}], "stream": True},
    "/v1/responses": {"input": "Hello", "stream": True},
}
PING = b": ping\n\n"
each_route = pytest.mark.parametrize("path", BODIES)


class Writer:
    """A BodyWriter that adds written data to the sent messages."""

    is_ready = True

    def __init__(self) -> None:
        self.call: Call | None = None
        self.num_written = 0

    def write(self, content: bytes) -> None:
        assert self.call is not None
        self.num_written += 1
        self.call.sent.append({"type": "http.response.body", "body": content, "more_body": True})
        self.call.news.set()

    def write_framed(self, before: bytes, content: bytes, after: bytes) -> None:
        self.write(before + content + after)


@pytest.fixture
def served(serve: Serve, model: ServedModel) -> Served:
    text = "Hello, you there.<|end|>"
    return serve(text, served_model=with_tools(model), model_info=None, automatic=False)


def post(served: Served, path: str, writer: Writer | None = None) -> Call:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if writer is not None:
            scope[BODY_WRITER] = writer
        await served.app(scope, receive, send)

    call = Call(app, "POST", path, BODIES[path])
    if writer is not None:
        writer.call = call
    return call


async def wait_for(call: Call, condition: Callable[[], bool]) -> None:
    while not condition():
        call.news.clear()
        await call.news.wait()


def read(call: Call) -> bytes:
    return b"".join(message.get("body", b"") for message in call.sent)


def fold(path: str, content: bytes) -> Json:
    events = read_events(content.replace(PING, b""))
    return strip_message(fold_message(events)) if path == "/v1/messages" else strip_response(fold_response(events))


def set_seconds(monkeypatch: pytest.MonkeyPatch, start: float, ping: float) -> None:
    for encoder in (MessageEncoder, ResponsesEncoder):
        monkeypatch.setattr(encoder, "start_seconds", start)
        monkeypatch.setattr(encoder, "ping_seconds", ping)


@each_route
def test_a_stream_begins_before_the_first_token(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_seconds(monkeypatch, 0.01, 0.01)

    async def scenario() -> bytes:
        call = post(served, path)
        await wait_for(call, lambda: len(call.sent) > 4)
        pings = [message["body"] for message in call.sent[1:]]
        kinds = [event["type"] for event in read_events(pings[0])]
        if path == "/v1/messages":
            assert kinds == ["message_start", "ping"]
            assert all(read_events(ping) == [{"type": "ping"}] for ping in pings[1:])
        else:
            assert kinds == ["response.created", "response.in_progress"] and set(pings[1:]) == {PING}
        while served.engine.open:
            served.engine.step()
        return (await call.reply()).content

    assert "Hello, you there." in str(fold(path, asyncio.run(scenario())))


@each_route
def test_an_early_error_has_a_status(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_seconds(monkeypatch, 600, 600)

    async def scenario() -> int:
        call = post(served, path)
        while not served.engine.submitted:
            await served.engine.changed.wait()
        served.engine.fail("gone")
        return (await call.reply()).status

    assert asyncio.run(scenario()) >= 500


@each_route
def test_pauses_in_a_stream_that_goes_past_the_middleware(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_seconds(monkeypatch, 600, 0.01)
    writer = Writer()

    async def scenario() -> bytes:
        call = post(served, path, writer)
        while not served.engine.submitted:
            await served.engine.changed.wait()
        served.engine.step()
        for _ in range(2):
            length = len(read(call))
            while b"ping" not in read(call)[length:]:
                call.news.clear()
                await call.news.wait()
            num_written = writer.num_written
            while writer.num_written == num_written:
                served.engine.step()
                for _ in range(10):
                    await asyncio.sleep(0)
        while served.engine.open:
            served.engine.step()
        return (await call.reply()).content

    assert "Hello, you there." in str(fold(path, asyncio.run(scenario())))


def test_tokens_of_which_nothing_is_sent_are_a_pause(
    serve: Serve, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A summary is sent as a whole."""
    set_seconds(monkeypatch, 600, 0.01)
    monkeypatch.setitem(
        BODIES, "/v1/messages", BODIES["/v1/messages"] | {"max_tokens": 900, "compaction": {"type": "summarize"}}
    )
    served = serve("Hello. " * 1000, served_model=with_tools(model), model_info=None, automatic=False)
    writer = Writer()

    async def scenario() -> bool:
        call = post(served, "/v1/messages", writer)
        while not served.engine.submitted:
            await served.engine.changed.wait()
        while served.engine.open and b"ping" not in read(call):
            served.engine.step()
            for _ in range(10):
                await asyncio.sleep(0)
        has_pinged_before_the_end = bool(served.engine.open)
        while served.engine.open:
            served.engine.step()
        await call.reply()
        return has_pinged_before_the_end

    assert asyncio.run(scenario())


@each_route
def test_a_generation_that_the_engine_aborts_is_an_error(served: Served, path: str) -> None:
    writer = Writer()

    async def scenario() -> bytes:
        call = post(served, path, writer)
        while not served.engine.submitted:
            await served.engine.changed.wait()
        served.engine.step()
        await call.news.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        (entry,) = served.engine.open.values()
        served.engine.open.clear()
        entry.sink(EngineCoreOutput(id=entry.request.id, token_ids=[], finish_reason=FinishReason.ABORT))
        return (await call.reply()).content

    last = read_events(asyncio.run(scenario()))[-1]
    assert last["type"] == ("error" if path == "/v1/messages" else "response.failed")
    assert "aborted" in str(last)
