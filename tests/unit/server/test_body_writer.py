"""Streams whose usual events bypass the middleware: the same bytes, also if the client reads slowly or disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.types import Receive, Scope, Send

from serve_llm.server.http.body_writer import BODY_WRITER
from support.asgi import Call
from support.serving import Served

Serve = Callable[..., Served]


class FakeWriter:
    """Adds written data to the sent messages. is_ready: whether the client reads."""

    def __init__(self) -> None:
        self.is_ready = True
        self.call: Call | None = None
        self.num_written = 0

    def write(self, content: bytes) -> None:
        assert self.is_ready and self.call is not None
        if content:
            self.num_written += 1
            self.call.sent.append({"type": "http.response.body", "body": content, "more_body": True})

    def write_framed(self, before: bytes, content: bytes, after: bytes) -> None:
        self.write(before + content + after)


def post(served: Served, writer: FakeWriter, **body: object) -> Call:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope[BODY_WRITER] = writer
        await served.app(scope, receive, send)

    given = {"prompt": "x", "temperature": 0, "max_tokens": 8, "stream": True} | body
    writer.call = Call(app, "POST", "/v1/completions", given)
    return writer.call


async def step_until_ended(served: Served, writer: FakeWriter, readiness: Callable[[int], bool]) -> None:
    while not served.engine.submitted:
        served.engine.changed.clear()
        await served.engine.changed.wait()
    number = 0
    while served.engine.open:
        writer.is_ready = readiness(number)
        served.engine.step()
        number += 1
        for _ in range(10):  # turns of the loop in which new events are sent
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"n": 2, "temperature": 1.0, "seed": 1},
        {"stream_options": {"continuous_usage_stats": True}},
        {"stream_options": {"include_usage": True}},
        {"stop": ["never"]},
        {"logprobs": 1},
    ],
)
@pytest.mark.parametrize("period", [1, 2], ids=["always", "sometimes"])
def test_the_events_are_those_that_are_sent_otherwise(serve: Serve, body: dict[str, object], period: int) -> None:
    served, writer = serve(automatic=False), FakeWriter()

    async def stream(writes: Callable[[int], bool]) -> list[object]:
        served.engine.submitted.clear()
        call = post(served, writer, **body)
        await step_until_ended(served, writer, writes)
        events = (await call.reply()).events()
        return [(event["choices"], event.get("usage")) for event in events]

    async def compare() -> None:
        expected = await stream(lambda number: False)
        assert writer.num_written == 0
        assert await stream(lambda number: number % period == 0) == expected
        assert writer.num_written > 0

    asyncio.run(compare())
    assert served.admission.num_open == 0


async def begin(served: Served, writer: FakeWriter) -> Call:
    """Start a stream with three events so far."""
    call = post(served, writer, max_tokens=50)
    while not served.engine.submitted:
        await asyncio.sleep(0)
    for _ in range(3):
        served.engine.step()
        for _ in range(10):
            await asyncio.sleep(0)
    return call


def test_a_client_that_leaves_ends_its_request(serve: Serve) -> None:
    served = serve(automatic=False)

    async def scenario() -> None:
        call = await begin(served, FakeWriter())
        call.leave()
        await call.finished

    asyncio.run(scenario())
    assert served.engine.aborted and served.admission.num_open == 0


def test_an_engine_that_fails_ends_the_stream_with_its_error(serve: Serve) -> None:
    served = serve(automatic=False)

    async def scenario() -> bytes:
        call = await begin(served, FakeWriter())
        served.engine.fail("it broke")
        return (await call.reply()).content

    content = asyncio.run(scenario()).decode()
    assert content.count('"text"') == 3 and "it broke" in content and content.endswith("data: [DONE]\n\n")
