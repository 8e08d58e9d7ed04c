"""Events of /v1/messages and /v1/responses if clients read slowly or disconnect, and usage compared with the
metrics."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from serve_llm.server.prompt.model import ServedModel
from support.agent_events import fold_message, fold_response, read_events, strip_message, strip_response
from support.asgi import Call
from support.serving import Served
from support.tools import with_tools, write_call

Json = dict[str, Any]
ServeText = Callable[..., Served]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TEXT = f"<think>\nHm, a < b.\n</think>\n\nI look.\n{write_call('get_weather', city='Oslo')}\n{write_call('clock')}"


class Route(NamedTuple):
    path: str
    body: Json
    fold: Callable[[list[Json]], Json]
    strip: Callable[[Json], Json]


MESSAGES = Route(
    "/v1/messages",
    {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 300,
        "tools": [{"name": name, "input_schema": SCHEMA} for name in ("get_weather", "clock")],
    },
    fold_message,
    strip_message,
)
RESPONSES = Route(
    "/v1/responses",
    {
        "input": "Hello",
        "tools": [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("get_weather", "clock")],
    },
    fold_response,
    strip_response,
)
ROUTES = [MESSAGES, RESPONSES]


@pytest.fixture
def serve_text(serve: ServeText, model: ServedModel) -> ServeText:
    def make(**more: Any) -> Served:
        return serve(TEXT + "<|end|>", **{"served_model": with_tools(model), "model_info": None, **more})

    return make


async def settle() -> None:
    """Wait until no task can make progress."""
    for _ in range(30):
        await asyncio.sleep(0)


async def begin(served: Served, route: Route) -> Call:
    """Start a stream whose request is with the engine."""
    call = Call(served.app, "POST", route.path, route.body | {"stream": True})
    while not served.engine.open:
        await asyncio.sleep(0)
    return call


def read_sent(call: Call) -> list[Json]:
    return read_events(b"".join(message.get("body", b"") for message in call.sent[1:]))


def list_places(events: list[Json]) -> list[tuple[object, ...]]:
    """Return the order of events: their types and numbers."""
    numbers = ("sequence_number", "index", "output_index", "content_index")
    return [(event["type"], *(event.get(name) for name in numbers)) for event in events if event["type"] != "ping"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_a_slow_reader_gets_the_same(serve_text: ServeText, route: Route, seed: int) -> None:
    served = serve_text(automatic=False, tokens_per_step=1 + seed)
    chooser = random.Random(seed)

    async def stream() -> list[Json]:
        call = await begin(served, route)
        while served.engine.open:
            if chooser.random() < 0.3:
                call.may_send.clear() if call.may_send.is_set() else call.may_send.set()
            served.engine.step()
            await settle()
        call.may_send.set()
        await call.finished
        return read_sent(call)

    async def answer() -> Json:
        call = Call(served.app, "POST", route.path, route.body)
        while not call.finished.done():
            if served.engine.open:
                served.engine.step()
            await asyncio.sleep(0)
        return (await call.reply()).json()

    assert route.strip(route.fold(asyncio.run(stream()))) == route.strip(asyncio.run(answer()))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_a_client_that_leaves_got_the_beginning(serve_text: ServeText, route: Route) -> None:
    served = serve_text(automatic=False)

    async def stream(num_steps: int) -> list[Json]:
        """Return the events of the first steps, after which the client disconnects."""
        call = await begin(served, route)
        for _ in range(num_steps):
            if served.engine.open:
                served.engine.step()
            await settle()
        call.leave()
        await settle()
        await call.finished
        assert not served.engine.open and served.admission.num_open == 0
        return read_sent(call)

    whole = asyncio.run(stream(1000))
    assert route.fold(whole)
    for num_steps in (1, 5, 12, 20, 30):
        begun = list_places(asyncio.run(stream(num_steps)))
        assert begun == list_places(whole)[: len(begun)] and len(begun) < len(whole)
    assert len(served.engine.aborted) == 5


def test_usage_and_metrics_agree(serve_text: ServeText) -> None:
    served = serve_text(cached_tokens=1)
    usages = []
    for route in ROUTES:
        usages.append(served.post(route.path, route.body).json()["usage"])
        usages.append(route.fold(read_events(served.post(route.path, route.body | {"stream": True}).content))["usage"])
    prompt = sum(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) for usage in usages)  # type: ignore
    output = sum(usage["output_tokens"] for usage in usages)  # type: ignore
    lines = served.get("/metrics").content.decode().splitlines()
    counted = {
        name: sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"serve_llm_{name}_tokens_total{{")
        )
        for name in ("prompt", "generation")
    }
    assert counted == {"prompt": prompt, "generation": output}
