"""Arguments that may be strings or other values, in formats that write strings without quotes."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from serve_llm.server.dialects.dialect import TaggedCodec
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.dialects.tool import Tool, ToolChoice
from support.dialects import FEW_DIALECTS, parse
from support.dialects import write_turn as write_text
from support.matrix import mostly_slow
from support.turn_grammars import accepts, get_tokenizer, walk, write_turn

REQUIRED = ToolChoice("required")
Schema = dict[str, object]
TAGGED = [name for name, one in BUILT_IN.items() if one.calls is not None and isinstance(one.calls.codec, TaggedCodec)]
STRING: Schema = {"type": "string"}
LIMITS: Schema = {
    "type": "object",
    "properties": {"low": {"type": "integer"}},
    "required": ["low"],
    "additionalProperties": False,
}
# A schema, allowed values, and other values.
UNIONS: list[tuple[Schema, list[object], list[object]]] = [
    ({"type": ["string", "null"]}, ["", "x", "nul", "nullable", "[x", None], []),
    ({"type": ["string", "boolean"]}, ["x", "t", "truely", True, False], []),
    ({"type": ["string", "integer"]}, ["x", "5mm", "555-1234", "1.5", "2026-12-31", 5, -17], []),
    ({"type": ["string", "number", "null"]}, ["x", "5mm", "-", 5, -1.5e-7, None], []),
    ({"anyOf": [STRING, {"type": "integer", "minimum": 3}]}, ["x", 17, 3], [2]),
    ({"anyOf": [STRING, {"enum": [1]}, {"type": "integer", "minimum": 3}]}, ["x", 1, 17], [2]),
    ({"anyOf": [STRING, LIMITS]}, ["x", "(x)", "[x", {"low": 1}], [{"low": "x"}]),
    ({"anyOf": [STRING, LIMITS, {"type": "null"}, {"type": "boolean"}]}, ["x", {"low": 1}, None, True], []),
    ({"anyOf": [STRING, {"$ref": "#/$defs/Limits"}]}, ["x", {"low": 1}, None], [{"low": None}]),
    ({"anyOf": [STRING, {"type": "array", "items": STRING}]}, ["x", "{x", ["a", "b"], []], [[1]]),
    ({"oneOf": [STRING, {"type": "null"}]}, ["x", None], []),
    ({"enum": ["nothing", None]}, ["nothing", None], ["x"]),
    ({"enum": ["5mm", "n/a", "tr", 5, 12, None, True]}, ["5mm", "n/a", "tr", 5, 12, None, True], [1, False]),
    ({"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]}, ["abcde", None], ["abcdef"]),
]


def build_tool(schema: Schema) -> Tool:
    parameters = {
        "type": "object",
        "properties": {"q": schema, "after": {"enum": ["y", '"]']}},
        "required": ["q", "after"],
        "additionalProperties": False,
        "$defs": {"Limits": {"anyOf": [LIMITS, {"type": "null"}]}},
    }
    return Tool("f", "", parameters)


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("name", mostly_slow(TAGGED, FEW_DIALECTS))
def test_every_value_of_a_union_can_be_written(name: str, has_tokens: bool) -> None:
    dialect = BUILT_IN[name]
    tokenizer = get_tokenizer(dialect, has_tokens)
    for schema, valid, invalid in UNIONS:
        tool = build_tool(schema)
        grammar = write_turn(tokenizer, dialect, [tool], REQUIRED, parallel=False)
        for values, expected in ((valid, True), (invalid, False)):
            for value in values:
                arguments = {"q": value, "after": "y"}
                text = write_text(dialect, calls=[("f", arguments)])
                assert accepts(tokenizer, grammar, text) == expected, (schema, text)
                if expected:
                    assert parse(dialect, text, tools=[tool]).decode_calls() == [("f", arguments)]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm4_7"])
def test_constants_may_be_written_as_in_python(name: str) -> None:
    dialect = BUILT_IN[name]
    tokenizer = get_tokenizer(dialect, True)
    tool = build_tool({"type": ["string", "boolean", "null"]})
    grammar = write_turn(tokenizer, dialect, [tool], REQUIRED, parallel=False)
    for written, value in (("None", None), ("True", True), ("false", False)):
        text = write_text(dialect, calls=[("f", {"q": written, "after": "y"})])
        assert accepts(tokenizer, grammar, text)
        assert parse(dialect, text, tools=[tool]).decode_calls() == [("f", {"q": value, "after": "y"})]


@pytest.mark.parametrize("written", ['"ab"', "(1)", "1 # one", "0x1", "1_0", ".5e1", " null", "\x1cTRUE"])
def test_what_the_grammar_takes_for_a_string_is_read_as_one(written: str) -> None:
    dialect = BUILT_IN["qwen3_coder"]
    tokenizer = get_tokenizer(dialect, False)
    schema: Schema = {"anyOf": [{"type": "string", "minLength": 3}, {"enum": [7, False, "k", None]}]}
    tool = build_tool(schema)
    grammar = write_turn(tokenizer, dialect, [tool], REQUIRED, parallel=False)
    text = write_text(dialect, calls=[("f", {"q": written, "after": "y"})])
    arguments = json.loads(parse(dialect, text, tools=[tool]).calls[0].arguments)
    assert accepts(tokenizer, grammar, text) == (arguments["q"] == written)


def test_a_string_that_begins_like_a_list_ends_at_its_delimiter() -> None:
    members = '<parameter=q>["x\n</parameter>\n<parameter=after>\n"]\n</parameter>\n'
    text = f"<tool_call>\n<function=f>\n{members}</function>\n</tool_call>"
    turn = parse(BUILT_IN["qwen3_coder"], text, tools=[build_tool({"type": ["string", "null"]})])
    assert turn.decode_calls() == [("f", {"q": '["x', "after": '"]'})]


def limit_strings(schema: Schema) -> Schema:
    """Return the schema with short strings, so that a random text ends."""
    text = json.dumps(schema).replace('"type": "string"', '"type": "string", "maxLength": 4')
    limited: Schema = json.loads(text)
    return limited | {"maxLength": 4} if isinstance(schema.get("type"), list) else limited


@pytest.mark.parametrize("number", mostly_slow(range(len(UNIONS)), [0, 5, 10]))
def test_what_the_grammar_of_a_union_allows_is_valid(number: int) -> None:
    tool = build_tool(limit_strings(UNIONS[number][0]))
    num_checked = 0
    for seed, name in enumerate(TAGGED * 2):
        dialect = BUILT_IN[name]
        tokenizer = get_tokenizer(dialect, seed < len(TAGGED))
        grammar = write_turn(tokenizer, dialect, [tool], REQUIRED, parallel=False)
        text = walk(tokenizer, grammar, random.Random(seed), max_tokens=100)
        if text is not None:
            [(_, arguments)] = parse(dialect, text, tools=[tool]).decode_calls()
            jsonschema.validate(arguments, tool.parameters)
            num_checked += 1
    assert num_checked
