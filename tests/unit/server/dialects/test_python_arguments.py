"""Arguments written as Python literals, with the tool's schema enforced."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from serve_llm.server.dialects.dialect import PythonicCodec
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.dialects.tool import Tool, ToolChoice
from support.dialects import FEW_DIALECTS, parse
from support.dialects import write_turn as write_text
from support.matrix import mostly_slow
from support.turn_grammars import accepts, get_tokenizer, walk, write_turn

REQUIRED = ToolChoice("required")
PYTHONIC = [
    name for name, one in BUILT_IN.items() if one.calls is not None and isinstance(one.calls.codec, PythonicCodec)
]
Schema = dict[str, object]
STRING: Schema = {"type": "string"}
FLAGS: Schema = {
    "type": "object",
    "properties": {"on": {"type": ["boolean", "null"]}, "it's": STRING, "next": {"$ref": "#/$defs/Flags"}},
    "required": ["on"],
    "additionalProperties": False,
}
OPTIONAL: Schema = {"anyOf": [{"$ref": "#/$defs/Flags"}, {"type": "null"}]}
# A schema, allowed values, and other values.
VALUES: list[tuple[Schema, list[object], list[object]]] = [
    (STRING, ["x", "it's", 'say "x"', "back\\slash\nline", "", "größe"], [1, None]),
    ({"type": "string", "maxLength": 3}, ["abc", "a'b"], ["abcd"]),
    ({"type": "string", "pattern": "^[a-c']+$"}, ["abc", "'"], ["d"]),
    ({"enum": ["it's", 'a"b', "x\ny", 5, True, None]}, ["it's", 'a"b', "x\ny", 5, True, None], ["x", False, 6]),
    ({"type": "array", "items": {"type": ["boolean", "null"]}}, [[], [True, None, False]], [["x"], True]),
    ({"type": "array", "items": STRING, "minItems": 1, "maxItems": 2}, [["a"], ["a", "b'"]], [[], ["a"] * 3]),
    ({"type": "array", "prefixItems": [STRING, {"type": "boolean"}]}, [["a", True, {"b": [None]}]], [[True]]),
    ({"type": "object", "additionalProperties": {"type": "boolean"}}, [{}, {"a b": True, "c": False}], [{"a": 1}]),
    ({"type": "object"}, [{"a": {"b": [True, 'x"', 1.5]}}], [[]]),
    ({"$ref": "#/$defs/Flags"}, [{"on": None}, {"on": True, "it's": "x", "next": {"on": False}}], [{"on": 1}, {}]),
    (OPTIONAL, [None, {"on": True}], [True]),
    ({"anyOf": [STRING, {"type": "integer", "minimum": 3}, {"type": "boolean"}]}, ["x", 17, True], [2]),
    ({}, ["x", None, [1, {"a": True}]], []),
    ({"type": "array", "uniqueItems": False, "items": {"type": "number"}}, [[1, 2.5]], [["x"]]),
]


def build_tool(schema: Schema) -> Tool:
    parameters = {
        "type": "object",
        "properties": {"q": schema, "after": {"type": "boolean"}},
        "required": ["q"],
        "additionalProperties": False,
        "$defs": {"Flags": FLAGS},
    }
    return Tool("f", "", parameters)


@pytest.mark.parametrize("name", PYTHONIC)
@pytest.mark.parametrize(("schema", "valid", "invalid"), VALUES, ids=str)
def test_values_are_written_as_in_python(name: str, schema: Schema, valid: list[object], invalid: list[object]) -> None:
    dialect = BUILT_IN[name]
    tokenizer = get_tokenizer(dialect, True)
    tool = build_tool(schema)
    grammar = write_turn(tokenizer, dialect, [tool], REQUIRED, parallel=False)
    for values, expected in ((valid, True), (invalid, False)):
        for value in values:
            arguments = {"q": value, "after": True}
            text = write_text(dialect, calls=[("f", arguments)])
            assert accepts(tokenizer, grammar, text) == expected, text
            if expected:
                assert parse(dialect, text, tools=[tool]).decode_calls() == [("f", arguments)]


@pytest.mark.parametrize("name", mostly_slow(PYTHONIC, FEW_DIALECTS))
def test_what_the_grammar_allows_is_valid(name: str) -> None:
    dialect = BUILT_IN[name]
    tokenizer = get_tokenizer(dialect, True)
    num_checked = 0
    for seed, (schema, _, _) in enumerate(VALUES * 2):
        tool = build_tool(schema)
        grammar = write_turn(tokenizer, dialect, [tool], REQUIRED, parallel=False)
        text = walk(tokenizer, grammar, random.Random(seed), max_tokens=100)
        if text is not None:
            [(_, arguments)] = parse(dialect, text, tools=[tool]).decode_calls()
            jsonschema.validate(arguments, tool.parameters)
            num_checked += 1
    assert num_checked > 10


def test_strings_may_have_double_quotes_and_what_python_cannot_enforce_is_json() -> None:
    dialect = BUILT_IN["llama3_pythonic"]
    tokenizer = get_tokenizer(dialect, True)
    keys = {"type": "object", "patternProperties": {"^x": STRING}, "additionalProperties": False}
    tool = build_tool({"type": "object", "properties": {"a": STRING, "keys": keys}, "required": ["a"]})
    grammar = write_turn(tokenizer, dialect, [tool], REQUIRED, parallel=False)
    for value, expected in (
        ("""{'a': "b'", "keys": {"x1": "y"}}""", True),
        ("""{"a": 'b"','keys':{}}""", True),
        ("""{'a': 'b', 'keys': {"y": "y"}}""", False),
    ):
        text = f"[f(q={value})]"
        assert accepts(tokenizer, grammar, text) == expected, text
        assert json.loads(parse(dialect, text, tools=[tool]).calls[0].arguments)


def test_a_tree_of_optional_parts_is_written_once() -> None:
    node: Schema = {
        "type": "object",
        "properties": {"left": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}, "v": {"type": "integer"}},
        "required": ["v"],
    }
    node["properties"] |= {"right": node["properties"]["left"]}  # type: ignore[operator,index]
    parameters: Schema = {"type": "object", "properties": {"t": {"$ref": "#/$defs/N"}}, "$defs": {"N": node}}
    for name in ("lfm2", "gemma4"):
        tokenizer = get_tokenizer(BUILT_IN[name], True)
        grammar = write_turn(tokenizer, BUILT_IN[name], [Tool("f", "", parameters)], REQUIRED)
        assert len(grammar) < 5000
        value = {"left": {"left": None, "v": 1}, "v": 2, "right": {"v": 3}}
        assert accepts(tokenizer, grammar, write_text(BUILT_IN[name], calls=[("f", {"t": value})]))
