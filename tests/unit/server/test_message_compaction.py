"""`compaction` in POST /v1/messages: the reply is a summary of the conversation, in a block of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from pydantic import TypeAdapter

from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.schema.messages import MessageReply
from serve_llm.server.schema.responses import SUMMARY_REQUEST
from support.agent_events import fold_message, read_events, strip_message
from support.serving import Served
from support.tools import with_strict_roles, with_tools, write_call

Json = dict[str, Any]
Serve = Callable[..., Served]
SUMMARY = "They talked about Oslo."
CLOCK: Json = {"name": "clock", "input_schema": {"type": "object"}}
CALL: Json = {"type": "tool_use", "id": "1", "name": "clock", "input": {}}
TALK: list[Json] = [
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": [CALL]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "Noon."}]},
    {"role": "assistant", "content": "It is noon."},
]


@pytest.fixture
def make(serve: Serve, model: ServedModel) -> Callable[[str], Served]:
    return lambda text: serve(text + "<|end|>", served_model=with_tools(model), model_info=None)


def compact(served: Served, **fields: Any) -> Json:
    """The body, which must equal what the events fold to."""
    body = {"max_tokens": 300, "messages": TALK, "tools": [CLOCK], "compaction": {"type": "summarize"}, **fields}
    whole = served.post("/v1/messages", body)
    assert whole.status == 200 and "x-ignored-fields" not in whole.headers, whole.content
    MessageReply.model_validate(whole.json(), extra="forbid")
    TypeAdapter(BetaMessage).validate_python(whole.json())
    events = read_events(served.post("/v1/messages", body | {"stream": True}).content)
    TypeAdapter(list[BetaRawMessageStreamEvent]).validate_python(events)
    assert strip_message(fold_message(events)) == strip_message(whole.json())
    return dict(whole.json())


def read_prompt(served: Served) -> str:
    return served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize("written", [SUMMARY, f"<think>\nHm.\n</think>\n\n{SUMMARY}", f"\n{SUMMARY}\n"])
def test_the_reply_is_a_summary(make: Callable[[str], Served], written: str) -> None:
    served = make(written)
    body = compact(served, thinking={"type": "adaptive"})
    assert body["content"] == [{"type": "compaction", "content": SUMMARY}] and body["stop_reason"] == "compaction"
    prompt = read_prompt(served)
    assert "It is noon." in prompt and prompt.index("Noon.") < prompt.index(SUMMARY_REQUEST)


def test_the_summary_is_text_even_if_it_looks_like_a_call(make: Callable[[str], Served]) -> None:
    call = write_call("clock")
    assert compact(make(call), tool_choice={"type": "any"})["content"] == [{"type": "compaction", "content": call}]


def test_templates_may_require_roles_to_alternate(serve: Serve, model: ServedModel) -> None:
    served = serve(SUMMARY + "<|end|>", served_model=with_strict_roles(model), model_info=None)
    assert compact(served, messages=TALK[:1])["content"] == [{"type": "compaction", "content": SUMMARY}]
    assert f"What time is it?\n\n{SUMMARY_REQUEST}" in read_prompt(served)


def test_instructions_replace_the_request(make: Callable[[str], Served]) -> None:
    served = make(SUMMARY)
    compact(served, compaction={"type": "summarize", "instructions": "In three words."})
    assert "In three words." in read_prompt(served) and SUMMARY_REQUEST not in read_prompt(served)
    compact(served, compaction={"type": "summarize", "instructions": " \n"})
    assert SUMMARY_REQUEST in read_prompt(served)


@pytest.mark.parametrize(("written", "fields", "reason"), [(SUMMARY, {"max_tokens": 2}, "max_tokens"), ("", {}, None)])
def test_a_part_of_a_summary_replaces_nothing(
    make: Callable[[str], Served], written: str, fields: Json, reason: str | None
) -> None:
    body = compact(make(written), **fields)
    assert body["content"] == [{"type": "compaction", "content": None}]
    assert body["stop_reason"] == (reason or "compaction")


def test_the_summary_is_read_in_place_of_the_conversation(make: Callable[[str], Served]) -> None:
    served = make(SUMMARY)
    content = compact(served)["content"]
    talk = [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on"}]
    assert served.post("/v1/messages", {"max_tokens": 5, "messages": talk}).status == 200
    assert SUMMARY in read_prompt(served) and "Noon." not in read_prompt(served)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compaction": {"type": "other"}}, "compaction.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "exclude each other"),
        ({"messages": TALK[:2]}, "tool_use block must be followed"),
    ],
    ids=str,
)
def test_what_is_refused(make: Callable[[str], Served], fields: Json, message: str) -> None:
    body = {"max_tokens": 300, "messages": TALK, "compaction": {"type": "summarize"}, **fields}
    reply = make(SUMMARY).post("/v1/messages", body)
    assert reply.status == 400 and message in reply.json()["error"]["message"]


def test_thinking_is_counted(serve: Serve, model: ServedModel) -> None:
    served = serve("<think>\nHm.\n</think>\n\nYes.<|end|>", served_model=with_tools(model), model_info=None)
    body = {"max_tokens": 300, "messages": TALK[:1], "thinking": {"type": "adaptive"}}
    usage = served.post("/v1/messages", body).json()["usage"]
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]
    events = read_events(served.post("/v1/messages", body | {"stream": True}).content)
    assert fold_message(events)["usage"]["output_tokens_details"] == usage["output_tokens_details"]
