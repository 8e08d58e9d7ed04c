"""Conversations in Anthropic's form that other servers and failed tools have part in, on a scripted engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.server.prompt.model import ServedModel
from support.asgi import Reply
from support.serving import Served
from support.tools import with_tools

CLOCK = {"name": "clock", "input_schema": {"type": "object"}}


@pytest.fixture
def served(serve: Callable[..., Served], model: ServedModel) -> Served:
    return serve("Hello.<|end|>", served_model=with_tools(model), model_facts=None)


def ask(served: Served, path: str = "/v1/messages", **fields: Any) -> Reply:
    return served.post(path, {"max_tokens": 300, "messages": [{"role": "user", "content": "Hello"}], **fields})


def prompt_text(served: Served) -> str:
    return served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


def test_what_anthropics_servers_did_is_skipped_by_name(served: Served) -> None:
    searched = [
        {"type": "server_tool_use", "id": "srv", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "srv", "content": []},
        {"type": "text", "text": "Found."},
        {"type": "tool_use", "id": "c", "name": "clock", "input": {}},
    ]
    found = [{"type": "tool_reference", "tool_name": "clock"}, {"type": "text", "text": "12:30"}]
    messages = [
        {"role": "assistant", "content": searched},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": found}]},
    ]
    names = "messages[0].content[0], messages[0].content[1], messages[1].content[0].content[0]"
    reply = ask(served, messages=messages, tools=[CLOCK])
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == names
    counted = ask(served, "/v1/messages/count_tokens", messages=messages, tools=[CLOCK])
    assert counted.headers["x-ignored-fields"] == "max_tokens, " + names
    assert "Found." in prompt_text(served) and "12:30" in prompt_text(served)
    metrics = served.get("/metrics").content.decode()
    assert 'ignored_fields_total{model_name="demo",route="/v1/messages"} 3.0' in metrics
    only = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": searched[:1]}]
    assert ask(served, messages=only).status == 200  # a turn that was paused


@pytest.mark.parametrize(
    ("text", "shown"),
    [("no such file", "Error: no such file"), ("Error: 3", "Error: 3"), ("", "Error"), ("<tool_use_error>3", None)],
)
def test_the_model_sees_that_a_tool_failed(served: Served, text: str, shown: str | None) -> None:
    use = {"type": "tool_use", "id": "c", "name": "clock", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": text, "is_error": True}
    for is_error, expected in ((True, shown or text), (False, text), (None, text)):
        messages = [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{**result, "is_error": is_error}]},
        ]
        assert ask(served, messages=messages, tools=[CLOCK]).status == 200
        failed = prompt_text(served)
        messages[1]["content"] = [{**result, "is_error": False, "content": expected}]
        assert ask(served, messages=messages, tools=[CLOCK]).status == 200
        assert failed == prompt_text(served)
    messages[1]["content"] = [{**result, "is_error": "yes"}]
    assert ask(served, messages=messages, tools=[CLOCK]).status == 400
