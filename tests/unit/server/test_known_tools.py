"""Anthropic's tools without a schema that the client runs: bash, the text editor and the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from anthropic.types.beta.beta_memory_tool_20250818_command import BetaMemoryTool20250818Command
from pydantic import TypeAdapter

from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.schema.known_tools import KNOWN_TOOLS
from support.asgi import Reply
from support.serving import Served
from support.tools import with_tools

BASH = {"type": "bash_20250124", "name": "bash"}
EDITOR = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 10000}
MEMORY = {"type": "memory_20250818", "name": "memory"}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n</tool_call><|end|>'


@pytest.fixture
def served(serve: Callable[..., Served], model: ServedModel) -> Served:
    return serve(CALL, served_model=with_tools(model), model_info=None)


def ask(served: Served, tools: list[Any], **fields: Any) -> Reply:
    body = {"max_tokens": 300, "messages": [{"role": "user", "content": "List the files."}], "tools": tools, **fields}
    return served.post("/v1/messages", body)


def prompt_text(served: Served) -> str:
    return served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


def test_the_model_sees_them_as_functions_and_calls_them(served: Served) -> None:
    reply = ask(served, [BASH, EDITOR, MEMORY])
    assert reply.headers["x-ignored-fields"] == "tools[1].max_characters"
    (use,) = reply.json()["content"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "bash", {"command": "ls -l"})
    assert reply.json()["stop_reason"] == "tool_use"
    for word in ("restart", "str_replace_based_edit_tool", "insert_text", "view_range", "/memories", "rename"):
        assert word in prompt_text(served)


def test_a_choice_may_name_them(served: Served) -> None:
    assert ask(served, [BASH], tool_choice={"type": "tool", "name": "bash"}).status == 200
    assert "restart" in str(served.engine.submitted[-1].sampling.grammar)


def test_names_and_schemas_of_the_request_count(served: Served) -> None:
    own = {"type": "object", "properties": {"script": {"type": "string"}}}
    ask(served, [{**BASH, "name": "shell", "description": "Run it.", "input_schema": own}, {"type": "bash_20241022"}])
    text = prompt_text(served)
    assert "script" in text and "Run it." in text and "restart" in text


def test_others_are_skipped(served: Served) -> None:
    tools = [
        {"type": "computer_20250124", "name": "computer", "display_width_px": 800, "display_height_px": 600},
        {"type": "bash_20990101", "name": "bash"},
    ]
    assert "tools[0], tools[1]" in ask(served, tools).headers["x-ignored-fields"]


def test_the_memorys_arguments_are_those_of_the_sdk() -> None:
    schema = KNOWN_TOOLS["memory_20250818"].schema
    published = TypeAdapter(BetaMemoryTool20250818Command).json_schema()["$defs"].values()
    names = {name for command in published for name in command["properties"]}
    assert schema["properties"].keys() == names
    commands = {command["properties"]["command"]["const"] for command in published}
    assert commands == set(schema["properties"]["command"]["enum"])
