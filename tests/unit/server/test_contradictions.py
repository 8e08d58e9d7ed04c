"""Requests with contradictory constraints, which only the engine detects: a client error."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.common.types import EngineCoreOutput, FinishReason
from serve_llm.server.prompt.model import ServedModel
from support.asgi import Call, Reply
from support.serving import Served
from support.tools import with_tools

Serve = Callable[..., Served]
MESSAGE = "no token is left"
TALK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": TALK,
    "/v1/messages": TALK,
    "/v1/responses": {"input": "Hello"},
}


def send(serve: Serve, model: ServedModel, path: str, *, stream: bool, num_steps: int) -> Reply:
    """Send a request. num_steps: engine steps before the contradiction is detected."""
    served = serve("Hello, you there.<|end|>", served_model=with_tools(model), model_info=None, automatic=False)

    async def run() -> Reply:
        call = Call(served.app, "POST", path, {**BODIES[path], "stream": stream})
        while not served.engine.submitted:
            await served.engine.changed.wait()
        for _ in range(num_steps):
            served.engine.step()
            for _ in range(10):
                await asyncio.sleep(0)
        (entry,) = served.engine.open.values()
        served.engine.open.clear()
        reason = FinishReason.ERROR
        entry.sink(EngineCoreOutput(entry.request.id, [], reason, error=MESSAGE, is_contradiction=True))
        return await call.reply()

    return asyncio.run(run())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("stream", "num_steps"), [(False, 0), (False, 2), (True, 0)])
def test_before_anything_was_sent_the_status_says_so(
    serve: Serve, model: ServedModel, path: str, stream: bool, num_steps: int
) -> None:
    reply = send(serve, model, path, stream=stream, num_steps=num_steps)
    error = reply.json()["error"]
    assert (reply.status, error["type"], error["message"]) == (400, "invalid_request_error", MESSAGE)


@pytest.mark.parametrize("path", BODIES)
def test_later_a_stream_ends_with_the_error(serve: Serve, model: ServedModel, path: str) -> None:
    reply = send(serve, model, path, stream=True, num_steps=2)
    assert reply.status == 200
    last = json.loads(re.findall(r"^data: (\{.*)$", reply.content.decode(), re.MULTILINE)[-1])
    error = last["response"]["error"] if path == "/v1/responses" else last["error"]
    kind = error["code"] if path == "/v1/responses" else error["type"]
    wanted = "invalid_prompt" if path == "/v1/responses" else "invalid_request_error"
    assert (kind, error["message"]) == (wanted, MESSAGE)
