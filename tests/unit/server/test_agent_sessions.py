"""Sessions as Codex CLI and Claude Code hold them, and the cases of Open Responses' compliance suite except for images.

The bodies have the recorded fields of these clients, with shorter texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.schema.responses import ResponseEvent, ResponseReply
from support.agent_events import fold_message, fold_response, read_events
from support.asgi import Reply
from support.fakes import Script
from support.serving import Served
from support.tools import with_tools, write_call

Serve = Callable[..., Served]
Json = dict[str, Any]
PATCH = """
start: "*** Begin Patch" LF update+ "*** End Patch" LF?
update: "*** Update File: " /(.+)/ LF line+
line: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
CODEX_TOOLS: list[Json] = [
    {"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False, "parameters": {
        "type": "object", "properties": {"cmd": {"type": "string"}, "workdir": {"type": "string"}},
        "required": ["cmd"], "additionalProperties": False}},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}},
    {"type": "namespace", "name": "mcp__docs", "description": "Documentation.", "tools": [
        {"type": "function", "name": "search", "parameters": {"type": "object", "properties": {}}}]},
    {"type": "web_search", "external_web_access": False},
]  # fmt: skip
CLAUDE_TOOLS: list[Json] = [
    {"name": name, "description": f"{name}s.", "input_schema": {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
        "properties": {"file_path": {"type": "string"}}, "required": ["file_path"], "additionalProperties": False}}
    for name in ("Read", "Edit")
]  # fmt: skip
CACHED: Json = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def serve_turns(serve: Serve, model: ServedModel) -> Callable[..., Served]:
    """Serve an engine that writes one text after another."""

    def make(*texts: str) -> Served:
        waiting = [model.tokenizer.encode(text + "<|end|>", add_special_tokens=False) for text in texts]
        script: Script = lambda request: waiting.pop(0)  # noqa: E731
        return serve(script=script, served_model=with_tools(model), model_info=None)

    return make


def show_prompt(served: Served) -> str:
    return served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


def ask_codex(served: Served, items: list[Json]) -> Json:
    reply = served.post(
        "/v1/responses",
        {
            "model": "demo",
            "instructions": "You are Codex.",
            "input": items,
            "tools": CODEX_TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0198",
            "client_metadata": {"session": "0198"},
        },
    )
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == "client_metadata, tools[3]"
    return fold_response(read_events(reply.content))


def test_codex(serve_turns: Callable[..., Served]) -> None:
    patch = "*** Begin Patch\n*** Update File: a.py\n-x\n+y\n*** End Patch\n"
    first = f"<think>\nLook first.\n</think>\n\n{write_call('exec_command', cmd='cat a.py')}"
    served = serve_turns(first, write_call("apply_patch", input=patch), write_call("mcp__docs__search"), "Done.")
    items: list[Json] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Replace x by y."}]},
    ]
    before = ""
    results = {"function_call": "x", "custom_tool_call": "Success."}
    kinds = []
    while True:
        response = ask_codex(served, items)
        prompt = show_prompt(served)
        assert prompt.startswith(before), "the prefix cache holds the conversation so far"
        before = prompt.removesuffix("<|assistant|>\n")
        kinds.append([item["type"] for item in response["output"]])
        items += response["output"]
        call = response["output"][-1]
        if call["type"] == "message":
            break
        output = {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": results[call["type"]]}
        items.append(output)
    assert kinds == [["reasoning", "function_call"], ["custom_tool_call"], ["function_call"], ["message"]]
    assert items[6]["input"] == patch and items[8]["namespace"] == "mcp__docs"
    assert "<think>\nLook first.\n</think>" in prompt and write_call("apply_patch", input=patch) in prompt


def ask_claude(served: Served, messages: list[Json]) -> Json:
    reply = served.post(
        "/v1/messages?beta=true",
        {
            "model": "demo",
            "max_tokens": 32000,
            "messages": messages,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0a1b"},
                {"type": "text", "text": "You are Claude Code.", **CACHED},
            ],
            "tools": CLAUDE_TOOLS,
            "metadata": {"user_id": "user_0198"},
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "stream": True,
        },
        {"x-api-key": "none", "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"},
    )
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == "context_management"
    return fold_message(read_events(reply.content))


def test_claude_code(serve_turns: Callable[..., Served]) -> None:
    reads = "\n".join(write_call("Read", file_path=name) for name in ("a.py", "b.py"))
    served = serve_turns(
        f"<think>\nRead it.\n</think>\n\nI look.\n{reads}",
        write_call("Edit", file_path="a.py"),
        "Done.",
    )
    text: Json = {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>"}
    messages: list[Json] = [{"role": "user", "content": [text, {"type": "text", "text": "Replace x.", **CACHED}]}]
    before = ""
    reasons = []
    while True:
        message = ask_claude(served, messages)
        prompt = show_prompt(served)
        assert prompt.startswith(before) and "billing" not in prompt
        before = prompt.removesuffix("<|assistant|>\n")
        reasons.append(message["stop_reason"])
        messages.append({"role": "assistant", "content": message["content"]})
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": f"{number}\tx", "is_error": False}
            for number, call in enumerate(calls)
        ]
        messages.append({"role": "user", "content": results})
    assert reasons == ["tool_use", "tool_use", "end_turn"]
    assert [block["type"] for block in messages[1]["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    counted = served.post("/v1/messages/count_tokens", {"model": "demo", "messages": messages, "tools": CLAUDE_TOOLS})
    assert counted.status == 200 and counted.json()["input_tokens"] > 0


# The cases of Open Responses' compliance suite.

WEATHER: Json = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
    },
}
USER: Json = {"type": "message", "role": "user", "content": "Say hello in exactly 3 words."}
COMPLIANCE: dict[str, tuple[Json, str, list[str]]] = {
    "basic response": ({"input": [USER]}, "Hello to you", ["message"]),
    "streaming response": ({"input": [USER], "stream": True}, "One, two, three", ["message"]),
    "system prompt": (
        {"input": [{"type": "message", "role": "system", "content": "You are a pirate."}, USER]},
        "Ahoy there matey",
        ["message"],
    ),
    "tool calling": (
        {"input": [USER], "tools": [WEATHER]},
        write_call("get_weather", location="San Francisco"),
        ["function_call"],
    ),
    "streaming tool call": (
        {"input": [USER], "tools": [WEATHER], "stream": True},
        write_call("get_weather", location="San Francisco"),
        ["function_call"],
    ),
    "multi-turn": (
        {"input": [{**USER, "content": "My name is Alice."}, {**USER, "role": "assistant"}, USER]},
        "Your name is Alice",
        ["message"],
    ),
}


@pytest.mark.parametrize("case", COMPLIANCE)
def test_open_responses(serve_turns: Callable[..., Served], case: str) -> None:
    body, written, kinds = COMPLIANCE[case]
    reply: Reply = serve_turns(written).post("/v1/responses", {"model": "demo", **body})
    assert reply.status == 200, reply.content
    response: Any = reply.json() if not body.get("stream") else None
    if response is None:
        events = read_events(reply.content)
        for event in events:
            ResponseEvent.model_validate(event)
        response = fold_response(events)
    ResponseReply.model_validate(response)
    assert response["status"] == "completed" and [item["type"] for item in response["output"]] == kinds
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + response["usage"]["output_tokens"]
