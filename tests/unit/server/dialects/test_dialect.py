"""Dialects as JSON: what is read, and which key an error names."""

from __future__ import annotations

import pytest

from serve_llm.server.dialects.dialect import Dialect, DialectError, read_dialect, write_dialect
from serve_llm.server.dialects.tool import Tool, ToolChoice

HERMES = """{
  "name": "hermes",
  "reasoning": {"open": "<think>\\n", "close": "\\n</think>\\n\\n"},
  "calls": {
    "codec": {"type": "json", "name_key": "name"},
    "open": ["<tool_call>\\n", "<tool_call>"],
    "close": "\\n</tool_call>",
    "separator": "\\n"
  },
  "ends": ["<|im_end|>"]
}"""

WRONG = [
    ("{}", "name"),
    ('{"name": "x", "calls": {"codec": {"type": "yaml"}, "open": "<"}}', "yaml"),
    ('{"name": "x", "calls": {"codec": {"type": "json"}, "open": 1}}', "$.calls.open"),
    ('{"name": "x", "calls": {"codec": {"type": "json"}, "opens": "<"}}', "opens"),
    ('{"name": "x", "calls": {"codec": {"type": "json"}}}', "section_open"),
    ('{"name": "x", "calls": {"codec": {"type": "json"}, "is_bare": true}}', "is_bare"),
    ('{"name": "x", "calls": {"codec": {"type": "json"}, "open": "<", "lead": "a"}}', "lead"),
    ('{"name": "x", "calls": {"codec": {"type": "gemma", "quote": ""}, "open": "<"}}', "quote"),
    ('{"name": "x", "calls": {"codec": {"type": "json", "name_key": "n"}, "open": "<", "id_open": ":"}}', "id_open"),
    ('{"name": "x", "reasoning": {"open": ["<think>", " "], "close": "</think>"}}', "open"),
    ("nothing", "malformed"),
]


def test_a_dialect_is_json_both_ways() -> None:
    dialect = read_dialect(HERMES)
    assert read_dialect(write_dialect(dialect)) == dialect
    assert dialect.calls is not None and dialect.calls.is_name_in_object
    assert dialect.reasoning is not None and not dialect.reasoning.repeats


@pytest.mark.parametrize(("text", "named"), WRONG)
def test_an_error_names_the_key(text: str, named: str) -> None:
    with pytest.raises(DialectError, match=named.replace("$", r"\$")):
        read_dialect(text)


def test_added_tokens_that_the_delimiters_name_are_found() -> None:
    tokens = ["<tool_call>", "</tool_call>", "<think>", "<|im_end|>", "<|image|>", ""]
    assert read_dialect(HERMES).find_tokens(tokens) == {"<tool_call>", "</tool_call>", "<think>"}
    assert Dialect(name="plain").find_tokens(tokens) == frozenset()


def test_a_choice_selects_tools() -> None:
    tools = (Tool("f"), Tool("g"))
    assert ToolChoice().select(tools) == tools
    assert ToolChoice("none").select(tools) == ()
    assert ToolChoice("required", ("g",), is_named=True).select(tools) == (tools[1],)
