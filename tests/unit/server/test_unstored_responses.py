"""Responses for which --responses-store has no room."""

from __future__ import annotations

import asyncio

import pytest

from serve_llm.server.http.errors import StoreFull
from serve_llm.server.schema.responses import ResponseReply
from serve_llm.server.storage import responses as responses_module
from support.asgi import Call
from support.stored_responses import PATH, Serve, ask, get, read_events, wait_for_status


def test_stored_bytes_are_bounded(serve_stored: Serve) -> None:
    served = serve_stored(limit=("stored-response-bytes=20000",))
    ids = [ask(served, input=f"{number} " * 1000)["id"] for number in range(6)]
    statuses = [get(served, one).status for one in ids]
    assert statuses[0] == 404 and statuses[-1] == 200 and statuses == sorted(statuses, reverse=True)
    too_large = [{"role": "user", "content": "x", "id": "y" * 30_000}]
    large = ask(served, input=too_large)
    assert large["store"] is False and get(served, large["id"]).status == 404
    assert get(served, ids[-1]).status == 200, "what does not fit at all evicts nothing"
    refused = served.post(PATH, {"input": too_large, "background": True})
    assert refused.status == 413 and served.admission.num_open == 0


@pytest.mark.parametrize("limit", [("stored-response-bytes=500",), ()])
def test_a_reply_that_is_not_stored_says_so(
    serve_stored: Serve, monkeypatch: pytest.MonkeyPatch, limit: tuple[str, ...]
) -> None:
    served = serve_stored(limit=limit)

    async def fail(*arguments: object) -> bool:
        raise StoreFull("database or disk is full")

    if not limit:
        monkeypatch.setattr(responses_module.ResponseStore, "add", fail)
    whole = ask(served)
    events = read_events(served.post(PATH, {"input": "Hi", "stream": True}).content)
    last = events[-1]["response"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed" and last["output"][0]["content"][0]["text"] == "Hello."
    for response in (whole, last):
        ResponseReply.model_validate(response)
        assert response["status"] == "completed" and response["store"] is False
        assert get(served, response["id"]).status == 404


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_background_response_that_is_too_large_fails_alone(serve_stored: Serve, is_stream: bool) -> None:
    served = serve_stored("many words " * 200, limit=("stored-response-bytes=5000",))
    small = ask(served, max_output_tokens=1)

    async def scenario() -> None:
        body = {"input": "Hi", "background": True, "stream": is_stream, "max_output_tokens": 900}
        reply = await Call(served.app, "POST", PATH, body).reply()
        first = read_events(reply.content)[0]["response"] if is_stream else reply.json()
        found = await wait_for_status(served, first["id"], "failed")
        assert "stored-response-bytes" in found["error"]["message"] and found["output"] == []
        if is_stream:
            last = read_events(reply.content)[-1]
            assert last["type"] == "response.failed" and last["response"] == found

    asyncio.run(scenario())
    assert get(served, small["id"]).status == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_background_response_whose_end_cannot_be_stored(
    serve_stored: Serve, monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    served = serve_stored(automatic=False)

    async def fail(*arguments: object) -> bool:
        raise StoreFull("the disk of --responses-store is full")

    async def scenario() -> None:
        call = Call(served.app, "POST", PATH, {"input": "Hi", "background": True, "stream": is_stream})
        while not served.engine.open:
            await asyncio.sleep(0)
        monkeypatch.setattr(responses_module.ResponseStore, "update", fail)
        while served.engine.open:
            served.engine.step()
        reply = await call.reply()
        first = read_events(reply.content)[0]["response"] if is_stream else reply.json()
        found = await wait_for_status(served, first["id"], "failed")
        ResponseReply.model_validate(found)
        assert "--responses-store is full" in found["error"]["message"] and found["output"] == []
        if is_stream:
            last = read_events(reply.content)[-1]
            assert last["type"] == "response.failed" and last["response"] == found
        cancelled = await Call(served.app, "POST", f"{PATH}/{first['id']}/cancel").reply()
        assert cancelled.json() == found, "it has ended"

    asyncio.run(scenario())
