"""Conversations in Anthropic's format that involve other servers and failed tools, on a scripted engine."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types.beta import BetaContentBlockParam

from serve_llm.server.prompt.model import ServedModel
from support.asgi import Reply
from support.fakes import make_model_info
from support.serving import Served
from support.tools import with_tools

CLOCK = {"name": "clock", "input_schema": {"type": "object"}}


@pytest.fixture
def served(serve: Callable[..., Served], model: ServedModel) -> Served:
    return serve("Hello.<|end|>", served_model=with_tools(model), model_info=None)


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
    assert ask(served, messages=only).status == 200  # a paused turn


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


@pytest.mark.parametrize("kind", ["mcp_tool_listing", "tool_addition", "container_upload", "fallback"])
def test_blocks_that_only_anthropics_servers_read_are_skipped(served: Served, kind: str) -> None:
    text = {"type": "text", "text": "Hello"}
    for role in ("user", "assistant", "system"):
        turn = {"role": role, "content": [text, {"type": kind, "file_id": "f"}]}
        reply = ask(served, messages=[turn, {"role": "user", "content": "Go on"}])
        assert reply.status == 200, reply.content
        assert reply.headers["x-ignored-fields"] == "messages[0].content[1]"
    assert ask(served, system=[{"type": kind}]).status == 400
    for wrong in ([], {}, None, 3):
        result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": wrong}]}
        for role, block in (("user", result), ("system", {"type": wrong}), ("assistant", {"type": wrong})):
            assert ask(served, messages=[{"role": role, "content": [block]}]).status == 400


def test_every_type_of_block_that_the_client_knows(served: Served) -> None:
    """Types that are not served are skipped and named, except for images."""
    members = typing.get_args(BetaContentBlockParam)
    names = [member.__annotations__["type"] for member in members if hasattr(member, "__annotations__")]
    known = {re.findall(r"'([^']+)'", str(name))[0] for name in names} - {"image"}
    assert len(known) > 20
    fields = {"text": "x", "thinking": "x", "content": [], "tool_use_id": "1", "id": "1", "name": "f", "input": {}}
    more = {"document": {"source": {"type": "text", "data": "x"}}, "compaction": {"content": None}}
    served_kinds = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result", "document", "search_result"}
    for kind in sorted(known):
        role = "user" if kind in ("document", "search_result", "tool_result", "container_upload") else "assistant"
        block = {"type": kind, **fields, **more.get(kind, {})}
        reply = ask(served, messages=[{"role": role, "content": [block]}, {"role": "user", "content": "Go on"}])
        assert reply.status == 200, reply.content
        place = None if kind in served_kinds else "messages[0].content[0]"
        assert reply.headers.get("x-ignored-fields") == place, kind


def test_the_summary_of_a_compacted_conversation_is_read(served: Served) -> None:
    compacted = {"role": "assistant", "content": [{"type": "compaction", "content": "They talked about Oslo."}]}
    reply = ask(served, messages=[compacted, {"role": "user", "content": "Go on"}])
    assert reply.status == 200 and "x-ignored-fields" not in reply.headers
    assert "They talked about Oslo." in prompt_text(served)


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


@pytest.mark.parametrize(
    ("tools", "choice", "is_auto"),
    [
        ([SEARCH], {"type": "tool", "name": "web_search"}, False),  # Claude Code's search request
        ([SEARCH], {"type": "any"}, False),
        ([SEARCH, CLOCK], {"type": "tool", "name": "web_search"}, True),
    ],
    ids=str,
)
def test_a_choice_of_server_tools_is_skipped_with_them(
    served: Served, tools: list[Any], choice: dict[str, str], is_auto: bool
) -> None:
    reply = ask(served, tools=tools, tool_choice=choice)
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == "tools[0], tool_choice"
    grammar = served.engine.submitted[-1].sampling.grammar
    assert ask(served, tools=tools).status == 200
    assert grammar == (served.engine.submitted[-1].sampling.grammar if is_auto else "")
    assert ask(served, tools=tools, tool_choice={"type": "tool", "name": "else"}).status == 400


def test_clients_find_how_much_too_long_a_prompt_is(serve: Callable[..., Served]) -> None:
    """Claude Code offers to compact the conversation when it reads these words."""
    served = serve("Hello.", model_info=make_model_info(max_model_len=16))
    for text in ("a b c d e f g h i j k l m n o p q r s t", "x " * 99999):
        reply = ask(served, messages=[{"role": "user", "content": text}])
        error = reply.json()["error"]
        assert reply.status == 400 and error["type"] == "invalid_request_error"
        found = re.fullmatch(r"prompt is too long: (\d+) tokens > 15 maximum", error["message"])
        assert found is not None and int(found[1]) > 15
