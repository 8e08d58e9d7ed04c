"""Arguments that are only well-formed, because the model need not call the tool and the tool is not strict."""

from __future__ import annotations

import pytest

from serve_llm.server.dialects.dialect import GemmaCodec, PythonicCodec, TaggedCodec
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.dialects.tool import Tool, ToolChoice
from support.dialects import parse
from support.dialects import write_turn as write_text
from support.turn_grammars import accepts, get_tokenizer, write_turn

AUTO = ToolChoice("auto")
OWN_FORMAT = [
    name
    for name, one in BUILT_IN.items()
    if one.calls is not None and isinstance(one.calls.codec, TaggedCodec | PythonicCodec | GemmaCodec)
]


@pytest.mark.parametrize("name", OWN_FORMAT)
def test_arguments_have_the_names_that_the_tool_declares(name: str) -> None:
    dialect = BUILT_IN[name]
    assert dialect.calls is not None
    names = ["plain", "user-id", "a.b", "größe", "x" * 80]
    if isinstance(dialect.calls.codec, TaggedCodec):
        names += ["user id", "filter[name]", "1st"]
    inner = {"type": "object", "properties": {"höhe-2": {"type": "integer"}}}
    properties: dict[str, object] = {key: {"type": "string"} for key in names}
    tool = Tool("f", "", {"type": "object", "properties": {**properties, "inner": inner}})
    tokenizer = get_tokenizer(dialect, True)
    grammar = write_turn(tokenizer, dialect, [tool], AUTO)
    arguments: dict[str, object] = dict.fromkeys(names, "v")
    text = write_text(dialect, calls=[("f", arguments | {"inner": {"höhe-2": 1}})])
    assert accepts(tokenizer, grammar, text), text
    assert parse(dialect, text, tools=[tool]).decode_calls() == [("f", arguments | {"inner": {"höhe-2": 1}})]


@pytest.mark.parametrize("number", ["1234567890123456789", "1e-100", "-0.12345678901234567890123", "1.5E+300"])
@pytest.mark.parametrize("name", OWN_FORMAT)
def test_numbers_are_not_cut(name: str, number: str) -> None:
    dialect = BUILT_IN[name]
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "number"}}})
    text = write_text(dialect, calls=[("f", {"a": 7})]).replace("7", number)
    tokenizer = get_tokenizer(dialect, True)
    assert accepts(tokenizer, write_turn(tokenizer, dialect, [tool], AUTO), text)
    assert f'"a": {number}}}' in parse(dialect, text, tools=[tool]).calls[0].arguments


def test_a_malformed_schema_that_binds_nothing_is_no_error() -> None:
    dialect = BUILT_IN["qwen3_coder"]
    tool = Tool("f", "", {"properties": ["a"], "items": [{"properties": {"b c": 1}}, 2]})
    tokenizer = get_tokenizer(dialect, True)
    text = write_text(dialect, calls=[("f", {"b c": "x"})])
    assert accepts(tokenizer, write_turn(tokenizer, dialect, [tool], AUTO), text)
