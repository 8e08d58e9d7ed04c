"""JSON Schema draft 2020-12 by keyword: what a grammar accepts and rejects, compared with the jsonschema package.

The behaviours are those that the JSON-Schema-Test-Suite examines; the schemas and values are our own.
"""

from __future__ import annotations

import json

import jsonschema
import pytest

from serve_llm.server.http.errors import InvalidRequest
from support.grammars import accepts, compile_grammar

Values = list[object]

KEYWORDS: list[tuple[str, object, Values, Values]] = [  # behaviour, schema, valid values, invalid values
    ("type integer", {"type": "integer"}, [0, -7, 10**20], [1.5, "1", True, None, [], {}]),
    ("type number", {"type": "number"}, [3, -2.75, 1e30], ["3", False, None]),
    ("type string", {"type": "string"}, ["", "é\u2028\U0001f600", '"\\\b'], [1, None, ["x"]]),
    ("type object", {"type": "object"}, [{}, {"b": [1]}], [[], "{}", None]),
    ("type array", {"type": "array"}, [[], [None, {}]], [{}, "[]"]),
    ("type boolean", {"type": "boolean"}, [True, False], [0, 1, "true", None]),
    ("type null", {"type": "null"}, [None], [False, 0, "", "null"]),
    ("type, several", {"type": ["boolean", "array"]}, [True, [3]], [None, {}, 1]),
    ("type, one in a list", {"type": ["string"]}, ["x"], [1]),
    ("enum", {"enum": [7, "seven", None, {"a": 7}]}, [7, "seven", None, {"a": 7}], [8, "Seven", {"a": 8}, {}, False]),
    ("enum with false", {"enum": [False]}, [False], [0, None, ""]),
    ("enum with 0", {"enum": [0]}, [0], [False, None]),
    ("enum with line breaks", {"enum": ["one\ntwo", "three\ttab"]}, ["one\ntwo", "three\ttab"], ["onetwo", "one two"]),
    ("enum and type", {"type": "string", "enum": ["x", 1]}, ["x"], [1]),
    ("enum in a property", {"type": "object", "properties": {"way": {"enum": ["in", "out"]}}, "required": ["way"]},
     [{"way": "in"}], [{}, {"way": "up"}]),
    ("const", {"const": 42}, [42], [41, "42", None]),
    ("const object", {"const": {"k": [1, False]}}, [{"k": [1, False]}], [{"k": [1]}, {}]),
    ("const array", {"const": [{"z": 1}]}, [[{"z": 1}]], [[], [{"z": 2}]]),
    ("const null", {"const": None}, [None], [0]),
    ("const with NUL", {"const": "a\0b"}, ["a\0b"], ["ab"]),
    ("minimum", {"type": "number", "minimum": -2.5}, [-2.5, 0, 1e10], [-2.6, -100]),
    ("minimum of integers", {"type": "integer", "minimum": 7}, [7, 70, 1007], [6, 0, -7]),
    ("maximum", {"type": "number", "maximum": 99.5}, [99.5, 99, -3], [99.6, 100]),
    ("maximum of integers", {"type": "integer", "maximum": -4}, [-4, -40], [-3, 4, 0]),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 0}, [0.01, 5], [0, -1]),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 3}, [2, -9], [3, 4]),
    ("range", {"type": "integer", "minimum": 195, "maximum": 2004}, [195, 200, 1999, 2004], [194, 2005, 20]),
    ("multipleOf", {"type": "integer", "multipleOf": 7}, [0, 21, -14], [1, 20]),
    ("multipleOf, decimals", {"type": "number", "multipleOf": 0.5}, [0.5, 2, -3.5], [0.7, 1.01]),
    ("minLength", {"type": "string", "minLength": 3}, ["abc", "\u00e9\u00e8\u00ea"], ["ab", ""]),
    ("minLength counts characters", {"type": "string", "minLength": 2}, ["\U0001f600\U0001f601"], ["\U0001f600"]),
    ("maxLength", {"type": "string", "maxLength": 2}, ["", "xy", "\U0001f600\U0001f601"], ["xyz"]),
    ("pattern", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ["AB-1", "ZZ-907"], ["A-1", "AB-", "xAB-1"]),
    ("pattern without anchors", {"type": "string", "pattern": "b+c"}, ["bc", "abbbcd"], ["b", "acb"]),
    ("pattern, alternatives", {"type": "string", "pattern": "^(?:on|off)$"}, ["on", "off"], ["onoff", "o"]),
    ("pattern and length", {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 3},
     ["ab"], ["a", "abab"]),
    ("format date-time", {"type": "string", "format": "date-time"}, ["2024-02-29T23:59:59Z"], ["2024-02-29", "now"]),
    ("format date", {"type": "string", "format": "date"}, ["1999-12-31"], ["1999-13-01", "31.12.1999"]),
    ("format time", {"type": "string", "format": "time"}, ["08:30:00Z", "08:30:00+02:00"], ["8:30", "25:00:00Z"]),
    ("format email", {"type": "string", "format": "email"}, ["ann@example.org"], ["ann", "@example.org"]),
    ("format ipv4", {"type": "string", "format": "ipv4"}, ["10.0.255.1"], ["10.0.256.1", "10.0.1"]),
    ("format uuid", {"type": "string", "format": "uuid"}, ["00000000-0000-4000-8000-00000000000a"], ["0000"]),
    ("items", {"type": "array", "items": {"type": "boolean"}}, [[], [True, False]], [[1], [True, None]]),
    ("items false", {"type": "array", "items": False}, [[]], [[None]]),
    ("items of items", {"type": "array", "items": {"type": "array", "items": {"const": 1}}},
     [[[1, 1], []]], [[1], [[2]]]),
    ("prefixItems", {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}]},
     [[1, 2], [1, 2, "x"], [1]], [[2], [1, 1]]),
    ("prefixItems and items", {"type": "array", "prefixItems": [{"const": "n"}], "items": {"type": "integer"}},
     [["n"], ["n", 4, 5]], [["n", "4"], [4]]),
    ("minItems", {"type": "array", "minItems": 2}, [[1, 2], [[], [], []]], [[], [1]]),
    ("maxItems", {"type": "array", "maxItems": 1}, [[], [5]], [[5, 5]]),
    ("maxItems 0", {"type": "array", "maxItems": 0}, [[]], [[0]]),
    ("properties", {"type": "object", "properties": {"n": {"type": "integer"}}},
     [{}, {"n": 1}, {"m": "x"}], [{"n": "x"}]),
    ("properties with odd names", {"type": "object", "properties": {'q"\\/': {"const": 1}, "\n": {"const": 2}}},
     [{'q"\\/': 1, "\n": 2}], [{'q"\\/': 2}, {"\n": 1}]),
    ("property false", {"type": "object", "properties": {"no": False}}, [{}, {"yes": 1}], [{"no": 1}]),
    ("property named as a keyword", {"type": "object", "properties": {"properties": {"type": "null"}}},
     [{"properties": None}], [{"properties": 1}]),
    ("required", {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]}, [{"a": 1, "b": 1}, {"b": 1}],
     [{"a": 1}, {}]),
    ("required without properties", {"type": "object", "required": ["x", "y"]}, [{"x": 1, "y": 2}], [{"x": 1}, {}]),
    ("additionalProperties false", {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
     [{}, {"a": 0}], [{"b": 0}, {"a": 0, "b": 0}]),
    ("additionalProperties", {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
     [{"a": 5, "b": None}], [{"b": 5}]),
    ("patternProperties", {"type": "object", "patternProperties": {"^id_": {"type": "integer"}}},
     [{"id_a": 1}, {"name": "x"}], [{"id_a": "x"}]),
    ("patternProperties and none else", {"type": "object", "patternProperties": {"^x": {}},
     "additionalProperties": False},
     [{"x1": 1}], [{"y": 1}]),
    ("minProperties", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ("maxProperties", {"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ("anyOf", {"anyOf": [{"type": "integer", "minimum": 10}, {"type": "string"}]}, [10, "x"], [9, None]),
    ("anyOf that overlap", {"anyOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, [1, 2.5, 3], [1.5]),
    ("anyOf with true", {"anyOf": [True, {"type": "null"}]}, [None, 1], []),
    ("anyOf with false", {"anyOf": [False, {"type": "null"}]}, [None], [1]),
    ("anyOf of objects", {"anyOf": [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
        {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"], "additionalProperties": False}]},
     [{"a": 1}, {"b": "x"}], [{}, {"a": "x"}, {"a": 1, "b": "x"}]),
    ("oneOf of types", {"oneOf": [{"type": "array"}, {"type": "null"}]}, [[], None], [{}, 0]),
    ("oneOf of constants", {"oneOf": [{"const": "a"}, {"const": "b"}]}, ["a", "b"], ["c", "ab"]),
    ("allOf", {"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 8}]}, [5, 8], [4, 9]),
    ("allOf of objects", {"type": "object", "allOf": [
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"properties": {"b": {"type": "null"}}, "required": ["b"]}]},
     [{"a": 1, "b": None}], [{"a": 1}, {"a": "x", "b": None}]),
    ("allOf beside keywords", {"type": "string", "maxLength": 3, "allOf": [{"minLength": 2}]}, ["ab"], ["a", "abcd"]),
    ("allOf in anyOf", {"anyOf": [{"allOf": [{"type": "string"}, {"maxLength": 1}]}, {"type": "null"}]},
     ["x", None], ["xy"]),
    ("$ref to $defs", {"$defs": {"n": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/n"}},
     [[1, 2]], [["1"]]),
    ("$ref to definitions", {"definitions": {"n": {"type": "null"}}, "$ref": "#/definitions/n"}, [None], [0]),
    ("$ref with escapes", {"$defs": {"a/b~c": {"const": 1}}, "$ref": "#/$defs/a~1b~0c"}, [1], [2]),
    ("$ref to a property", {"type": "object", "properties": {"a": {"type": "integer"},
     "b": {"$ref": "#/properties/a"}}},
     [{"a": 1, "b": 2}], [{"b": "x"}]),
    ("$ref to $ref", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": [5]}}, "$ref": "#/$defs/a"}, [5], [6]),
    ("$ref beside keywords", {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "minLength": 2},
     ["ab"], ["a", 22]),
    ("$ref to true", {"$defs": {"any": True}, "$ref": "#/$defs/any"}, [1, {}], []),
    ("$ref to the root", {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False},
     [{}, {"child": {"child": {}}}], [{"child": 1}, {"child": {"x": 1}}]),
    ("a tree", {"$defs": {"t": {"type": "object", "properties": {"v": {"type": "integer"}, "t": {"type": "array",
     "items": {"$ref": "#/$defs/t"}}}, "required": ["v"], "additionalProperties": False}}, "$ref": "#/$defs/t"},
     [{"v": 1, "t": [{"v": 2}, {"v": 3, "t": []}]}], [{"t": []}, {"v": 1, "t": [{}]}]),
    ("a property named $ref", {"type": "object", "properties": {"$ref": {"type": "string"}}},
     [{"$ref": "x"}], [{"$ref": 1}]),
    ("true", True, [1, None, {"a": []}], []),
    ("empty", {}, [False, "x", [[]]], []),
    ("annotations", {"title": "t", "description": "d", "default": 3, "examples": [1], "deprecated": True,
     "$comment": "c",
     "readOnly": True, "type": "null"}, [None], [3]),
    ("unknown words", {"type": "integer", "colour": "red", "x-order": 3}, [1], ["red"]),
    ("uniqueItems false", {"type": "array", "uniqueItems": False}, [[1, 1]], [1]),
    ("uniqueItems of one item", {"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 2]]),
    ("uniqueItems of a string", {"type": "string", "uniqueItems": True}, ["aa"], [[1]]),
    ("unevaluatedProperties true", {"type": "object", "allOf": [{}], "unevaluatedProperties": True}, [{"a": 1}], [1]),
    ("unevaluatedProperties empty", {"anyOf": [{"type": "object"}], "unevaluatedProperties": {"title": "any"}},
     [{"a": 1}], [1]),
    ("unevaluatedProperties, closed", {"type": "object", "properties": {"a": {}}, "additionalProperties": False,
     "unevaluatedProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
    ("unevaluatedProperties without subschemas", {"properties": {"a": {}}, "patternProperties": {"^x": {}},
     "unevaluatedProperties": {"type": "null"}}, [{"a": 1, "b": None}, {"x1": 1}], [{"b": 1}]),
    ("unevaluatedItems true", {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": True}, [[1, 2]],
     [[2]]),
    ("unevaluatedItems beside items", {"items": {"type": "null"}, "unevaluatedItems": False}, [[None]], [[1]]),
    ("contains, not even once", {"type": "array", "contains": {"const": 1}, "minContains": 0}, [[], [2]], [1]),
    ("minContains alone", {"type": "array", "minContains": 2, "maxContains": 1}, [[], [1, 1]], [1]),
    ("if alone", {"if": {"type": "string"}, "type": "integer"}, [1], ["x"]),
    ("then and else alone", {"then": {"type": "string"}, "else": False, "type": "integer"}, [1], ["x"]),
    ("if with idle parts", {"if": {"type": "string"}, "then": {}, "else": True, "type": "integer"}, [1], ["x"]),
    ("not false", {"not": False, "type": "null"}, [None], [1]),
    ("$schema and $id", {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.org/a",
     "type": "boolean"}, [True], [1]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"), [case[1:] for case in KEYWORDS], ids=[case[0] for case in KEYWORDS]
)
def test_a_keyword_is_enforced(schema: object, valid: Values, invalid: Values) -> None:
    grammar = compile_grammar(json=schema)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    for value in valid:
        assert validator.is_valid(value), f"the case itself is wrong: {value}"
        assert accepts(grammar, json.dumps(value, ensure_ascii=False)), value
    for value in invalid:
        # jsonschema does not know all formats.
        assert "format" in str(schema) or not validator.is_valid(value), f"the case itself is wrong: {value}"
        assert not accepts(grammar, json.dumps(value, ensure_ascii=False)), value


def test_old_drafts_have_no_min_contains() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "contains": {"const": 1}, "minContains": 0}
    with pytest.raises(InvalidRequest, match="contains:"):
        compile_grammar(json=schema)


def test_old_drafts_have_no_unevaluated_properties() -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "unevaluatedProperties": False}
    assert accepts(compile_grammar(json=schema), '{"a":1}')
    assert not accepts(
        compile_grammar(json={**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"}), '{"a":1}'
    )


def test_a_reference_may_lead_through_a_keyword_without_effect() -> None:
    with pytest.raises(InvalidRequest, match="if:"):
        compile_grammar(json={"properties": {"a": {"$ref": "#/if"}}, "if": {"type": "string"}})


UNENFORCEABLE: dict[str, object] = {
    "not": {"not": {"pattern": "^x+y"}},
    "if": {"if": {"multipleOf": 2}, "then": {"minLength": 1}, "else": {"type": "null"}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"const": 1}},
    "minContains": {"type": "array", "contains": {"const": 1}, "minContains": 2},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3, "pattern": "a"}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"], "b": False}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": "b", "c": [1]}},
    "unevaluatedProperties": {"anyOf": [{"required": ["a"]}, {"type": "object"}], "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]},
    "format": {"type": "string", "format": "regex"},
    "$ref": {"$ref": "https://example.org/other.json"},
    "$dynamicRef": {"$dynamicRef": "#node"},
    "extends": {"extends": {"type": "null"}},
    "divisibleBy": {"divisibleBy": 2},
    "multipleOf": {"type": "number", "multipleOf": -1},
    "disallow": {"disallow": "string"},
    "pattern": {"type": "string", "pattern": "^(?!x)"},
    "patternProperties": {"type": "object", "patternProperties": {"a": {"type": "null"}, "b": {"type": "integer"}}},
}


@pytest.mark.parametrize("keyword", UNENFORCEABLE)
@pytest.mark.parametrize("is_nested", [False, True], ids=["root", "nested"])
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name(keyword: str, is_nested: bool) -> None:
    schema = UNENFORCEABLE[keyword]
    if is_nested:
        schema = {"type": "object", "properties": {"list": {"type": "array", "items": schema}}}
    with pytest.raises(InvalidRequest) as caught:
        compile_grammar(json=schema)
    place = " at #/properties/list/items" if is_nested else ""
    # A keyword and the keyword that it depends on are refused together.
    names = {"minContains": "contains", "if": "else"}.get(keyword, keyword)
    assert caught.value.message.startswith(f"structured_outputs.json{place}: {names}: "), caught.value.message
