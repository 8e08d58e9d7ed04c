"""Schemas of tools in formats that do not write arguments as JSON: enforced exactly, or refused by name."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import pytest

from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.dialects.tool import Tool, ToolChoice
from serve_llm.server.structured_output.errors import GrammarError
from support.dialects import parse
from support.dialects import write_turn as write_text
from support.random_schemas import build_schema
from support.turn_grammars import accepts, get_tokenizer, walk, write_turn

REQUIRED = ToolChoice("required")
Schema = dict[str, object]
INTEGER: Schema = {"type": "integer"}
OBJECTS: list[tuple[Schema, list[str], list[str]]] = [
    ({}, ["{}", "{a:1,b:{c:true}}"], ["1"]),
    ({"additionalProperties": False}, ["{}"], ["{a:1}"]),
    ({"additionalProperties": INTEGER}, ["{}", "{a:1}", "{a:1,b:2}"], ["{a:true}", "{a:1,}"]),
    ({"required": ["a"], "additionalProperties": INTEGER}, ["{a:1}"], ["{}", "{b:1}", "{a:true}"]),
    ({"properties": {"a": False, "b": INTEGER}}, ["{}", "{b:1}"], ["{a:1}"]),
    ({"type": ["object", "null"], "properties": {"a": INTEGER}}, ["null", "{a:1}"], ["{a:null}"]),
    ({"properties": {"a": {"enum": [1, "x"], "type": "integer"}}}, ["{a:1}"], ['{a:<|"|>x<|"|>}', "{a:2}"]),
    ({"properties": {"a": {"enum": [1, "x"], "type": ["string", "null"]}}}, ['{a:<|"|>x<|"|>}'], ["{a:1}"]),
    ({"properties": {"a": {"enum": [1, 2, "x"], "const": 2}}}, ["{a:2}"], ["{a:1}", '{a:<|"|>x<|"|>}']),
    ({"properties": {"a": {"title": "Any"}}}, ["{a:1}", "{a:[null]}", '{a:<|"|>x<|"|>}'], ["{a:x}"]),
    ({"properties": {"a": {"type": "string", "nullable": True}}}, ['{a:<|"|>x<|"|>}'], ["{a:null}"]),
    ({"properties": {"a": {"allOf": [INTEGER], "maximum": 3}}}, ["{a:3}"], ["{a:4}"]),
    ({"properties": {"a": {"allOf": [INTEGER], "title": "A"}}}, ["{a:3}"], ["{a:null}"]),
]


def write(dialect: str, parameters: Schema) -> str:
    """Return the grammar of one required call."""
    tokenizer = get_tokenizer(BUILT_IN[dialect], True)
    return write_turn(tokenizer, BUILT_IN[dialect], [Tool("f", "", parameters)], REQUIRED, parallel=False)


@pytest.mark.parametrize(("keywords", "valid", "invalid"), OBJECTS, ids=str)
def test_objects_of_a_codec_with_quotes_of_its_own(keywords: Schema, valid: list[str], invalid: list[str]) -> None:
    grammar = write("gemma4", {"properties": {"o": {"type": "object", **keywords}}, "required": ["o"]})
    tokenizer = get_tokenizer(BUILT_IN["gemma4"], True)
    for values, expected in ((valid, True), (invalid, False)):
        for value in values:
            assert accepts(tokenizer, grammar, f"<|tool_call>call:f{{o:{value}}}<tool_call|>") == expected, value


STRING: Schema = {"type": "string"}
REFUSED: list[tuple[str, Schema, str]] = [
    *(
        (dialect, {"properties": {"o": {"type": kind, keyword: value}}}, keyword)
        for dialect in ("gemma4",)
        for kind, keyword, value in (
            ("object", "minProperties", 2),
            ("object", "patternProperties", {"^a": INTEGER}),
            ("object", "not", {}),
            ("object", "allOf", [{"required": ["a"]}]),
            ("object", "const", {"a": 1}),
            ("array", "enum", [[1]]),
            ("array", "items", [INTEGER]),
            ("array", "allOf", [{"maxItems": 1}]),
        )
    ),
    *(
        (dialect, {"properties": {"o": schema}, "$defs": {"a": STRING}}, keyword)
        for dialect in ("gemma4", "qwen3_coder")
        for schema, keyword in (
            ({"$ref": "#/$defs/a", "maxLength": 3}, "$ref"),
            ({"$ref": "#/$defs/b"}, "$ref"),
            ({"enum": ["a", "bb"], "maxLength": 1}, "enum"),
            ({"enum": ["a"], "type": "null"}, "enum"),
            ({"anyOf": [STRING, INTEGER], "maxLength": 3}, "anyOf"),
            ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
            ({"type": "string", "maxLength": -1}, "maxLength"),
            ({"allOf": [STRING], "maxLength": 3}, "allOf"),
        )
    ),
    *(
        (dialect, {"properties": {name: INTEGER}}, "properties")
        for dialect, name in (
            ("gemma4", "a b"),
            ("gemma4", 'quo"te'),
            ("llama3_pythonic", "x/y"),
            ("olmo3", ""),
            ("qwen3_coder", "a>b"),
            ("qwen3_coder", " a"),
            ("minimax_m2", 'quo"te'),
            ("glm4_7", "a</arg_key>"),
        )
    ),
    ("qwen3_coder", {"required": ["a"], "additionalProperties": False}, "required"),
]


@pytest.mark.parametrize(("dialect", "parameters", "named"), REFUSED, ids=str)
def test_what_cannot_be_enforced_is_refused_by_name(dialect: str, parameters: Schema, named: str) -> None:
    with pytest.raises(GrammarError, match=r"\(function f\)") as caught:
        write(dialect, parameters)
    assert caught.value.keyword == named


@pytest.mark.parametrize("dialect", ["qwen3_coder", "olmo3", "gemma4"])
def test_a_refusal_has_a_pointer(dialect: str) -> None:
    inner = {"type": "object", "properties": {"b": {"type": "array", "items": {"not": {"format": "date"}}}}}
    with pytest.raises(GrammarError) as caught:
        write(dialect, {"properties": {"a": inner}})
    assert (caught.value.pointer, caught.value.keyword) == ("/properties/a/properties/b/items", "not")


ENDS = [
    ("qwen3_coder", "</parameter>"),
    ("glm4_5", "</arg_value>"),
    ("minimax_m2", "</parameter>"),
    ("deepseek_v3_2", "</｜DSML｜parameter>"),
    ("gemma4", '<|"|>'),
    ("function_gemma", "<escape>"),
]


@pytest.mark.parametrize(("dialect", "end"), ENDS)
@pytest.mark.parametrize("template", ["{}", "b {} c", "{}\n"])
def test_a_value_that_cannot_be_written_is_refused(dialect: str, end: str, template: str) -> None:
    value = template.format(end)
    schemas: list[tuple[Schema, str]] = [
        ({"enum": ["a", value]}, "enum"),
        ({"enum": [1, value]}, "enum"),
        ({"const": value}, "const"),
        ({"anyOf": [INTEGER, {"const": value}]}, "const"),
    ]
    for schema, keyword in schemas:
        with pytest.raises(GrammarError, match=re.escape(repr(value))) as caught:
            write(dialect, {"properties": {"a": schema}})
        assert (caught.value.pointer, caught.value.keyword) == ("/properties/a", keyword)


@pytest.mark.parametrize(("dialect", "end"), ENDS)
def test_values_that_begin_like_their_end_are_written(dialect: str, end: str) -> None:
    values = ["", " ", "\n", "a\n", " \n b", end[:-1], end[1:], end[: len(end) // 2] * 2]
    tokenizer = get_tokenizer(BUILT_IN[dialect], True)
    grammar = write(dialect, {"properties": {"a": {"enum": values}}, "required": ["a"]})
    for value in values:
        text = write_text(BUILT_IN[dialect], calls=[("f", {"a": value})])
        assert accepts(tokenizer, grammar, text), text
        tools = [Tool("f", "", {"properties": {"a": {"type": "string"}}})]
        assert parse(BUILT_IN[dialect], text, tools=tools).decode_calls() == [("f", {"a": value})]


@pytest.mark.parametrize(("dialect", "end"), ENDS[:4])
def test_lists_and_objects_may_hold_the_end_of_values(dialect: str, end: str) -> None:
    schema: Schema = {"properties": {"a": {"type": "array", "items": STRING}}, "required": ["a"]}
    arguments: Schema = {"a": [end, f'x"{end}']}
    text = write_text(BUILT_IN[dialect], calls=[("f", arguments)])
    tokenizer = get_tokenizer(BUILT_IN[dialect], has_tokens=False)
    tool = Tool("f", "", schema)
    assert accepts(tokenizer, write_turn(tokenizer, BUILT_IN[dialect], [tool], REQUIRED), text)
    assert parse(BUILT_IN[dialect], text, tools=[tool]).decode_calls() == [("f", arguments)]


def test_constants_of_python_follow_the_schema() -> None:
    tokenizer = get_tokenizer(BUILT_IN["llama3_pythonic"], True)
    for schema, valid, invalid in (
        ({"anyOf": [{"const": True}, {"type": "integer"}]}, ["True", "1"], ["false", "False"]),
        ({"anyOf": [{"type": "boolean"}, {"type": "integer"}], "maximum": 3}, ["true", "3"], ["4"]),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, ["None", "3"], ["True"]),
    ):
        grammar = write("llama3_pythonic", {"properties": {"a": schema}, "required": ["a"]})
        assert all(accepts(tokenizer, grammar, f"[f(a={value})]") for value in valid), schema
        assert not any(accepts(tokenizer, grammar, f"[f(a={value})]") for value in invalid), schema


TREE: Schema = {
    "type": "object",
    "properties": {"v": INTEGER, "l": {"type": "array", "items": {"$ref": "#"}}, "a": {"$ref": "#/properties/l/items"}},
    "additionalProperties": False,
}
LINKED: Schema = {
    "properties": {"a": {"anyOf": [{"$ref": "#/$defs/Node%3CT%3E"}, {"type": "null"}]}},
    "$defs": {
        "Node<T>": {
            "type": "object",
            "properties": {"v": INTEGER, "next": {"$ref": "#/properties/a"}},
            "required": ["v"],
        }
    },
}
REFERENCES = [
    (TREE, [{"l": [{"v": 1}, {"l": []}]}, {"a": {"l": [{}]}}], [{"l": [[]]}, {"l": [1]}, {"a": {"v": True}}]),
    (
        LINKED,
        [{"a": {"v": 1, "next": {"v": 2, "next": None}}}],
        [{"a": {"v": 1, "next": {}}}, {"a": {"v": 1, "next": 2}}],
    ),
]


@pytest.mark.parametrize("dialect", ["hermes", "llama3", "qwen3_coder", "lfm2", "gemma4"])
@pytest.mark.parametrize(("parameters", "valid", "invalid"), REFERENCES)
def test_references_lead_into_the_whole_schema(
    dialect: str, parameters: Schema, valid: list[Schema], invalid: list[Schema]
) -> None:
    tokenizer = get_tokenizer(BUILT_IN[dialect], True)
    grammar = write(dialect, parameters)
    for values, expected in ((valid, True), (invalid, False)):
        for value in values:
            text = write_text(BUILT_IN[dialect], calls=[("f", value)])
            assert accepts(tokenizer, grammar, text) == expected, text


def test_a_bare_call_beside_a_form_of_the_content_follows_its_references() -> None:
    tokenizer = get_tokenizer(BUILT_IN["llama3"], True)
    content = json.dumps({"grammars": [{"json_schema": INTEGER}]})
    for parameters, valid, invalid in REFERENCES:
        tool = Tool("f", "", parameters, strict=True)
        grammar = write_turn(tokenizer, BUILT_IN["llama3"], [tool], ToolChoice("auto"), content=content)
        for values, expected in ((valid, True), (invalid, False)):
            for value in values:
                text = write_text(BUILT_IN["llama3"], calls=[("f", value)])
                assert accepts(tokenizer, grammar, text) == expected, text


def test_a_text_that_is_read_as_null_is_no_string() -> None:
    grammar = write("qwen3_coder", {"properties": {"a": {"type": "string", "nullable": True}}})
    tokenizer = get_tokenizer(BUILT_IN["qwen3_coder"], True)
    for value, expected in (("nullable", True), ("null", False), (" None", False)):
        text = write_text(BUILT_IN["qwen3_coder"], calls=[("f", {"a": value})])
        assert accepts(tokenizer, grammar, text) == expected, text


def test_references_beside_uris_are_refused() -> None:
    inner = {"type": "array", "items": {"$id": "http://x/y", "$ref": "#"}}
    with pytest.raises(GrammarError) as caught:
        write("qwen3_coder", {"properties": {"a": inner}})
    assert caught.value.keyword == "$ref"


@pytest.mark.parametrize("dialect", ["hermes", "mistral", "llama3", "qwen3_coder", "olmo3", "gemma4"])
def test_arguments_are_an_object(dialect: str) -> None:
    definition = {"type": ["object", "null"], "properties": {"a": INTEGER}, "required": ["a"]}
    for parameters in (definition, {"$ref": "#/$defs/x", "$defs": {"x": definition}}):
        text = write_text(BUILT_IN[dialect], calls=[("f", {"a": 1})])
        grammar = write(dialect, parameters)
        tokenizer = get_tokenizer(BUILT_IN[dialect], True)
        assert accepts(tokenizer, grammar, text)
        assert "{" not in text or not accepts(tokenizer, grammar, re.sub(r"\{[^{}]*1\}", "null", text))
    with pytest.raises(GrammarError, match="object"):
        write(dialect, {"type": "array"})


def test_numbers_of_any_size_are_read() -> None:
    for number in ("1e999", "9" * 5000):
        turn = parse(BUILT_IN["gemma4"], f"<|tool_call>call:f{{a:{number}}}<tool_call|>", tools=[Tool("f")])
        assert turn.calls[0].has_ended and turn.calls[0].arguments == f'{{"a": {number}}}'


def build_plain_schema(number: int) -> Schema:
    """Return a random schema whose names every format can write."""
    text = json.dumps(build_schema(random.Random(number)), ensure_ascii=False)
    for name, plain in (("a b", "a_b"), ('quo\\"te', "quote"), ("x/y", "x_y")):
        text = text.replace(name, plain)
    return json.loads(text)  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (6, 16, 26))])
@pytest.mark.parametrize("dialect", ["qwen3_coder", "glm4_7", "deepseek_v3_2", "olmo3", "lfm2", "gemma4"])
def test_what_the_grammar_of_a_random_schema_allows_is_valid(dialect: str, first: int) -> None:
    num_checked = 0
    for number in range(first, first + (10 if first else 6)):
        schema = build_plain_schema(number)
        try:
            grammar = write(dialect, schema)
        except GrammarError as error:
            assert error.keyword, error.message
            continue
        tool = Tool("f", "", schema)
        text = walk(get_tokenizer(BUILT_IN[dialect], True), grammar, random.Random(number), max_tokens=120)
        if text is not None:
            turn = parse(BUILT_IN[dialect], text, tools=[tool])
            assert turn.calls and turn.calls[0].has_ended and not turn.content, text
            jsonschema.validate(json.loads(turn.calls[0].arguments), schema)
            num_checked += 1
    assert num_checked
