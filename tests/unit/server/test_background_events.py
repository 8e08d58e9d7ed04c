"""The first events of background responses, and references to stored items."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.server.response.responses import ResponsesEncoder
from serve_llm.server.response.sse import PING
from support.agent_events import read_events
from support.asgi import Call
from support.serving import Served

Json = dict[str, Any]
PATH = "/v1/responses"


@pytest.fixture
def serve_stored(serve: Callable[..., Served]) -> Callable[..., Served]:
    def make(**more: Any) -> Served:
        return serve("Hello.<|end|>", options={"responses_store": "memory"}, **more)

    return make


def test_a_queued_response_says_so_at_once(serve_stored: Callable[..., Served]) -> None:
    """A client learns the id before the first token."""
    served = serve_stored(automatic=False)

    async def stream() -> list[Json]:
        call = Call(served.app, "POST", PATH, {"input": "Hi", "background": True, "stream": True})
        while len(call.sent) < 3:
            await call.news.wait()
            call.news.clear()
        sent = read_events(b"".join(message.get("body", b"") for message in call.sent[1:]))
        assert [event["type"] for event in sent] == ["response.created", "response.queued"]
        while served.engine.open:
            served.engine.step()
        return read_events((await call.reply()).content)

    events = asyncio.run(stream())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    statuses = {event["type"]: event["response"]["status"] for event in events if "response" in event}
    assert statuses == {
        "response.created": "queued",
        "response.queued": "queued",
        "response.in_progress": "in_progress",
        "response.completed": "completed",
    }
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_pauses_have_pings_for_every_follower(
    serve_stored: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResponsesEncoder, "ping_seconds", 0.01)
    served = serve_stored(automatic=False)

    async def wait_for_pings(call: Call, least: int) -> None:
        while sum(message.get("body") == PING for message in call.sent) < least:
            call.news.clear()
            await call.news.wait()

    async def scenario() -> tuple[bytes, bytes]:
        first = Call(served.app, "POST", PATH, {"input": "Hi", "background": True, "stream": True})
        await wait_for_pings(first, 1)
        response_id = read_events(first.sent[1]["body"])[0]["response"]["id"]
        second = Call(served.app, "GET", f"{PATH}/{response_id}?stream=true&starting_after=0")
        await wait_for_pings(second, 2)
        await wait_for_pings(first, 2)
        while served.engine.open:
            served.engine.step()
        return (await first.reply()).content, (await second.reply()).content

    whole, rest = (read_events(content.replace(PING, b"")) for content in asyncio.run(scenario()))
    assert whole[1:] == rest and whole[-1]["type"] == "response.completed"
    stored = served.get(f"{PATH}/{whole[0]['response']['id']}?stream=true").content
    assert PING not in stored and read_events(stored) == whole


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": "item_reference"}])
def test_references_may_lack_their_type(serve_stored: Callable[..., Served], kind: Json) -> None:
    served = serve_stored()
    first: Any = served.post(PATH, {"input": "One"}).json()
    question = served.get(f"{PATH}/{first['id']}/input_items").json()["data"][0]  # type: ignore[index]
    references = [{**kind, "id": item["id"]} for item in (question, *first["output"])]
    body = {"input": [*references, {"role": "user", "content": "Two", "id": "mine"}]}
    second: Any = served.post(PATH, body)
    assert second.status == 200, second.content
    ids = served.engine.submitted[-1].prompt_ids
    prompt = served.model.tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt.index("One") < prompt.index("Hello.") < prompt.index("Two")
    stored: Any = served.get(f"{PATH}/{second.json()['id']}/input_items?order=asc").json()["data"]
    assert stored[:2] == [question, *first["output"]] and stored[2]["type"] == "message"
    counted: Any = served.post(PATH + "/input_tokens", body).json()
    assert counted["input_tokens"] == len(ids)
    missing: Any = served.post(PATH, {"input": [{**kind, "id": "msg_none"}]})
    assert missing.status == 400 and missing.json()["error"]["param"] == "input[0]"
