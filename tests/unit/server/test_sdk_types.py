"""Replies and stream events have every key and value that the types of the openai and anthropic packages require."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter

from serve_llm.server.prompt.model import ServedModel
from support.agent_events import read_events
from support.asgi import Reply
from support.matrix import mostly_slow
from support.serving import Served
from support.tools import TOOLS, with_tools, write_call

Json = dict[str, Any]
Serve = Callable[..., Served]

CALLS = f"{write_call('clock')}\n{write_call('patch', input='+ a')}"
TEXT = f"<think>\nHm.\n</think>\n\nI look.\n{CALLS}<|end|>"
PATCH = {"type": "custom", "name": "patch"}
RESPONSE: Json = {
    "input": "Hi",
    "tools": [{"type": "function", "name": "clock"}, PATCH],
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "top_logprobs": 2,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"verbosity": "low"},
}
FORMS: list[Json] = [
    {},
    {"max_output_tokens": 3},
    {"input": "Hi"},
    {"tool_choice": {"type": "function", "name": "clock"}, "truncation": "auto", "metadata": {"a": "b"}},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}, "user": "me"},
]
MESSAGE: Json = {
    "max_tokens": 300,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [{"name": name, "input_schema": {"type": "object"}} for name in ("clock", "patch")],
    "thinking": {"type": "adaptive"},
}


@pytest.fixture
def served(serve: Serve, model: ServedModel) -> Served:
    options = {"responses_store": "memory"}
    return serve(TEXT, served_model=with_tools(model), model_info=None, options=options)


def check(kind: Any, reply: Reply) -> None:
    assert reply.status == 200, reply.content
    TypeAdapter(kind).validate_json(reply.content, strict=True)


def check_events(kind: Any, events: Iterable[Json]) -> None:
    adapter = TypeAdapter(kind)
    for event in events:
        adapter.validate_python(event, strict=True)


@pytest.mark.parametrize("form", mostly_slow(FORMS, [FORMS[0], FORMS[3]]), ids=range(len(FORMS)))
def test_responses(served: Served, form: Json) -> None:
    body = RESPONSE | form
    reply = served.post("/v1/responses", body)
    check(Response, reply)
    for more in ({}, {"background": True}):
        streamed = read_events(served.post("/v1/responses", body | more | {"stream": True}).content)
        check_events(ResponseStreamEvent, streamed)
        assert streamed[-1]["response"].keys() == reply.json().keys()
    queued = served.post("/v1/responses", body | {"background": True})
    check(Response, queued)
    check(Response, served.get(f"/v1/responses/{queued.json()['id']}"))
    check(InputTokenCountResponse, served.post("/v1/responses/input_tokens", RESPONSE))


def test_hosted_tools_are_repeated_as_they_were_sent(served: Served) -> None:
    tools: list[Json] = [
        {"type": "file_search", "vector_store_ids": ["vs_1"], "max_num_results": 3},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "mcp", "server_label": "docs", "server_url": "https://example.com/mcp", "require_approval": "never"},
        {"type": "computer_use_preview", "display_width": 1, "display_height": 1, "environment": "linux"},
        {"type": "web_search", "search_context_size": "low"},
    ]
    reply = served.post("/v1/responses", {"input": "Hi", "tools": tools})
    check(Response, reply)
    assert reply.json()["tools"] == tools
    assert reply.headers["x-ignored-fields"] == "tools[0], tools[1], tools[2], tools[3], tools[4]"


def test_input_items(served: Served) -> None:
    items: list[Json] = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "developer", "content": [{"type": "input_text", "text": "Three"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Four"}]},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Five"}]},
        {"type": "function_call", "call_id": "1", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "Six"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "Seven"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": "Eight"},
    ]
    created: Any = served.post("/v1/responses", RESPONSE | {"input": items}).json()
    listed = served.get(f"/v1/responses/{created['id']}/input_items")
    check(ResponseItemList, listed)
    assert len(listed.json()["data"]) == len(items)  # type: ignore[index]


@pytest.mark.parametrize(
    "form",
    [{}, {"n": 2}, {"logprobs": True, "top_logprobs": 2}, {"max_tokens": 3}],
    ids=["plain", "n", "logprobs", "cut"],
)
def test_chat_completions(served: Served, form: Json) -> None:
    body: Json = {"tools": [*TOOLS, {"type": "custom", "custom": {"name": "patch"}}], **form}
    check(ChatCompletion, served.chat(**body))
    body["tools"] = TOOLS  # the types of events do not include custom tools
    check_events(ChatCompletionChunk, served.chat(**body, stream=True, stream_options={"include_usage": True}).events())


@pytest.mark.parametrize("form", [{}, {"logprobs": 2, "n": 2}, {"max_tokens": 3}])
def test_completions(served: Served, form: Json) -> None:
    check(Completion, served.complete(**form))
    events = served.complete(**form, stream=True, stream_options={"include_usage": True}).events()
    for choice in (choice for event in events for choice in event["choices"]):
        choice["finish_reason"] = choice["finish_reason"] or "stop"  # OpenAI's events have null too, unlike the type
    check_events(Completion, events)


@pytest.mark.parametrize(
    "form", [{}, {"max_tokens": 5}, {"stop_sequences": ["look"]}, {"thinking": {"type": "disabled"}}]
)
def test_messages(served: Served, form: Json) -> None:
    body = MESSAGE | form
    check(Message, served.post("/v1/messages", body))
    check_events(RawMessageStreamEvent, read_events(served.post("/v1/messages", body | {"stream": True}).content))
    check(MessageTokensCount, served.post("/v1/messages/count_tokens", body))


def test_models(served: Served) -> None:
    check(Model, served.get("/v1/models/demo"))
    check(ModelInfo, served.get("/v1/models/demo"))
