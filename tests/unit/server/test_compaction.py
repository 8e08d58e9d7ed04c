"""POST /v1/responses/compact, and items of type compaction and compaction_trigger."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import ResponseStreamEvent
from openai.types.responses.compacted_response import CompactedResponse
from pydantic import TypeAdapter

from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.schema.responses import SUMMARY_REQUEST, CompactionReply
from support.agent_events import read_events
from support.asgi import Reply
from support.serving import Served
from support.tools import with_strict_roles, with_tools

Json = dict[str, Any]
Serve = Callable[..., Served]

PATH = "/v1/responses/compact"
SUMMARY = "They talked about Oslo."
REASONED = f"<think>\nHm.\n</think>\n\n{SUMMARY}"
HEADED = f"Summary of the conversation so far:\n{SUMMARY}"
CLOCK: Json = {"type": "function", "name": "clock"}
ANSWER: Json = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "In Norway."}]}
CALL: list[Json] = [
    {"type": "function_call", "call_id": "1", "name": "clock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "Noon."},
]
CONVERSATION: list[Json] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Where is Oslo?"},
    ANSWER,
    {"role": "user", "content": [{"type": "input_text", "text": "What time is it?"}]},
    *CALL,
]
TRIGGER: Json = {"type": "compaction_trigger"}


@pytest.fixture
def served(serve: Serve, model: ServedModel) -> Served:
    return serve(REASONED + "<|end|>", served_model=with_tools(model), model_info=None)


def compact(served: Served, **fields: Any) -> Json:
    reply = served.post(PATH, {"model": "demo", "input": CONVERSATION, **fields})
    assert reply.status == 200, reply.content
    return dict(reply.json())


def read_prompt(served: Served) -> str:
    return served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


def ask(served: Served, *items: Json, **fields: Any) -> Reply:
    return served.post("/v1/responses", {"input": list(items), **fields})


def test_a_conversation_becomes_its_messages_and_a_summary(served: Served) -> None:
    body = compact(served, tools=[CLOCK], instructions="Be kind.", parallel_tool_calls=True, prompt_cache_key="x")
    TypeAdapter(CompactionReply).validate_python(body, strict=True)
    assert body["object"] == "response.compaction" and body["id"].startswith("resp_")
    *kept, summary = body["output"]
    texts = [item["content"][0]["text"] for item in kept]
    assert [item["role"] for item in kept] == ["developer", "user", "user"]
    assert texts == ["Be brief.", "Where is Oslo?", "What time is it?"]
    assert len({item["id"] for item in body["output"]}) == 4
    assert summary.keys() == {"id", "type", "encrypted_content"} and SUMMARY not in json.dumps(summary)
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    prompt = read_prompt(served)
    assert SUMMARY_REQUEST in prompt and "Noon." in prompt and "Be kind." in prompt and '"clock"' in prompt


def test_the_official_client_reads_the_reply(served: Served) -> None:
    body = compact(served, input="Where is Oslo?")
    assert body["output"][0]["content"] == [{"type": "input_text", "text": "Where is Oslo?"}]
    TypeAdapter(CompactedResponse).validate_python({**body, "output": body["output"][1:]}, strict=True)


def test_the_output_is_read_as_input(served: Served) -> None:
    output = compact(served)["output"]
    reply = ask(served, *output, {"role": "user", "content": "Go on"})
    assert reply.status == 200 and "x-ignored-fields" not in reply.headers
    prompt = read_prompt(served)
    assert HEADED in prompt and "In Norway." not in prompt and "Noon." not in prompt
    assert prompt.index("What time is it?") < prompt.index(HEADED) < prompt.index("Go on")


def test_templates_may_require_roles_to_alternate(serve: Serve, model: ServedModel) -> None:
    served = serve(REASONED + "<|end|>", served_model=with_strict_roles(model), model_info=None)
    compact(served, input="Where is Oslo?")
    assert f"Where is Oslo?\n\n{SUMMARY_REQUEST}" in read_prompt(served)


def test_a_summary_of_a_summary(served: Served) -> None:
    once = compact(served)["output"]
    again = compact(served, input=[*once, ANSWER])["output"]
    assert [item["type"] for item in again] == [item["type"] for item in once]
    assert HEADED in read_prompt(served)


@pytest.mark.parametrize("encrypted", ["gAAAAABo_x-1==", "x", None, 3, ""])
def test_a_summary_that_another_server_wrote_is_skipped(served: Served, encrypted: object) -> None:
    reply = ask(served, {"type": "compaction", "encrypted_content": encrypted}, {"role": "user", "content": "Hi"})
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "input[0]"


def test_the_length_of_a_summary_is_limited(served: Served) -> None:
    compact(served)
    assert 100 < served.engine.submitted[0].sampling.max_tokens <= 8192


def test_a_conversation_beyond_the_context_is_cut_if_asked(served: Served) -> None:
    long = {"role": "user", "content": "tea " * 3000}
    reply = served.post(PATH, {"input": [long, ANSWER]})
    assert reply.status == 400 and reply.json()["error"]["code"] == "context_length_exceeded"
    assert compact(served, input=[long, ANSWER], truncation="auto")["output"][-1]["type"] == "compaction"
    assert SUMMARY_REQUEST in read_prompt(served)


@pytest.mark.parametrize("fields", [{"input": None}, {"input": []}, {}])
def test_a_conversation_is_required(served: Served, fields: Json) -> None:
    reply = served.post(PATH, fields)
    assert reply.status == 400 and reply.json()["error"]["param"] == "input"


def test_no_summary_is_an_error(serve: Serve, model: ServedModel) -> None:
    served = serve("<think>\nHm.\n</think>\n\n<|end|>", served_model=with_tools(model), model_info=None)
    reply = served.post(PATH, {"input": CONVERSATION})
    assert reply.status == 500 and "no summary" in reply.json()["error"]["message"]


def test_a_previous_response_needs_a_store(served: Served) -> None:
    reply = served.post(PATH, {"previous_response_id": "resp_1"})
    assert reply.status == 404 and reply.json()["error"]["code"] == "previous_response_not_found"


def test_a_stored_conversation_is_summarised(serve_stored: Serve) -> None:
    served = serve_stored(SUMMARY)
    first = ask(served, {"role": "user", "content": "Where is Oslo?"}).json()
    reply = served.post(PATH, {"previous_response_id": first["id"], "input": None})
    assert reply.status == 200, reply.content
    message, summary = reply.json()["output"]
    assert message["content"][0]["text"] == "Where is Oslo?" and summary["type"] == "compaction"
    assert served.get(f"/v1/responses/{reply.json()['id']}").status == 404


def test_a_summary_has_no_grammar(served: Served) -> None:
    reply = ask(served, *CONVERSATION, TRIGGER, structured_outputs={"regex": "[ab]+"})
    assert reply.status == 400 and reply.json()["error"]["param"] == "structured_outputs"


def test_a_trigger_makes_the_reply_a_summary(served: Served) -> None:
    fields: Json = {"text": {"format": {"type": "json_object"}}, "tools": [CLOCK], "tool_choice": "required"}
    reply = ask(served, *CONVERSATION, TRIGGER, **fields)
    assert reply.status == 200 and "x-ignored-fields" not in reply.headers
    reasoning, summary = reply.json()["output"]
    assert reasoning["type"] == "reasoning" and summary["type"] == "compaction"
    assert SUMMARY_REQUEST in read_prompt(served)
    events = read_events(ask(served, *CONVERSATION, TRIGGER, stream=True).content)
    TypeAdapter(list[ResponseStreamEvent]).validate_python(events, strict=True)
    kinds = [event["type"].removeprefix("response.") for event in events if event.get("output_index") == 1]
    assert kinds == ["output_item.added", "compaction.compacting", "output_item.done"]
    final = events[-1]["response"]["output"][1]
    assert final["encrypted_content"] == summary["encrypted_content"]
    assert final == next(
        event["item"] for event in events if event["type"].endswith("item.done") and event["output_index"]
    )


def test_a_trigger_before_the_last_item_has_no_effect(served: Served) -> None:
    reply = ask(served, TRIGGER, {"role": "user", "content": "Hi"})
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "input[0]"
    assert SUMMARY_REQUEST not in read_prompt(served)


def test_what_a_stored_summary_stands_for_is_left_out(serve_stored: Serve) -> None:
    served = serve_stored(SUMMARY)
    first = ask(served, *CONVERSATION).json()
    second = ask(served, TRIGGER, previous_response_id=first["id"]).json()
    third = ask(served, {"role": "user", "content": "Go on"}, previous_response_id=second["id"])
    assert third.status == 200
    prompt = read_prompt(served)
    assert HEADED in prompt and "Where is Oslo?" in prompt and "In Norway." not in prompt and "Noon." not in prompt


def test_a_continued_response_may_have_no_input(serve_stored: Serve) -> None:
    served = serve_stored("Hello.")
    first = ask(served, {"role": "user", "content": "Hi"}).json()
    reply = served.post("/v1/responses", {"previous_response_id": first["id"]})
    assert reply.status == 200, reply.content
    assert served.get(f"/v1/responses/{reply.json()['id']}/input_items").json()["data"] == []
