"""Structured output: texts that grammars of JSON schemas accept, wherever requests contain a schema."""

from __future__ import annotations

import json

import jsonschema
import pytest

from serve_llm.server.http.errors import InvalidRequest
from support.grammars import accepts, compile_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}

# Schemas with valid and invalid texts: jsonschema must agree with the grammar.
ENFORCED: list[tuple[object, list[str], list[str]]] = [
    ({}, ['{"a": [1, null, "x"]}', "3"], ["nul", "{", "01"]),
    (True, ["[]"], ["]"]),
    ({"type": "integer", "minimum": -3, "maximum": 120}, ["-3", "120", "0"], ["121", "-4", "1.5", '"1"']),
    ({"type": "integer", "minimum": -(2**53), "maximum": 2**53}, [str(2**53), str(-(2**53))], [str(2**53 + 1)]),
    ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, [str(2**63 - 1)], [str(2**63), "-1"]),
    ({"const": 2**62}, [str(2**62)], [str(2**62 + 1)]),
    ({"type": "integer", "minimum": 5, "exclusiveMinimum": 6}, ["7"], ["6", "5"]),
    ({"type": "number", "multipleOf": 0.25}, ["0.75", "2"], ["0.3"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"\u00e9\u00e9\u00e9"'], ['"a"', '"abcd"', "ab"]),
    ({"type": "string", "pattern": "^[a-c]+$"}, ['"abc"'], ['"abd"', '""']),
    ({"type": "string", "pattern": "^[[a]]$"}, ['"[]"', '"a]"'], ['"a"', '"b]"']),
    ({"type": "string", "pattern": "^[^[a]$"}, ['"b"'], ['"["', '"a"']),
    ({"type": "string", "pattern": "^[ab&&b~~a]$"}, ['"a"', '"b"', '"&"', '"~"'], ['"c"']),
    ({"type": "string", "pattern": "^[!-~]$"}, ['"~"', '"!"', '"["'], ['" "']),
    ({"type": "string", "pattern": "^[[:alpha:]]$"}, ['":]"', '"[]"'], ['"a"', '"z]"']),
    ({"type": "string", "pattern": r"^[\[\]\-.a]\.$"}, ['"]."', '"-."', '"a."'], ['"b."', '"ab"']),
    ({"type": "string", "pattern": "^.$"}, ['"a"', '"\u00e9"'], ['"\\r"', '"\\n"', '"\u2028"', '"\u2029"']),
    ({"type": "object", "patternProperties": {"^[[a]]$": {"type": "integer"}}, "additionalProperties": False},
     ['{"a]":1}'], ['{"a":1}', '{"a]":"x"}']),
    ({"type": "string", "pattern": "b"}, ['"abc"'], ['"acc"']),
    ({"enum": ["a", 1, None, {"x": [1]}]}, ['"a"', "1", "null", '{"x":[1]}'], ['"b"', "2", '{"x":[2]}']),
    ({"const": "a\"\\\n"}, [json.dumps("a\"\\\n")], ['"a"']),
    (SCHEMA, ['{"a":1}', '{ "a" : 1 }'], ["{}", '{"a":"1"}', '{"a":1,"b":2}']),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, ['{"a":1,"b":"\\n"}'],
     ['{"a":1,"\\u0061":"x"}']),
    ({"type": "object", "properties": {"a": False}}, ['{"b":1}'], ['{"\\u0061":1}']),
    ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, ['{"ab":1}'], ['{"\\u0061b":"x"}']),
    ({"type": "object", "required": ["z"]}, ['{"z":1}'], ["{}"]),
    ({"type": "object", "additionalProperties": {"type": "boolean"}}, ['{"k":true}', "{}"], ['{"k":1}']),
    ({"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": False},
     ['{"n1":2}'], ['{"n1":"2"}', '{"m":2}']),
    ({"additionalProperties": False, "anyOf": [{"type": "object"}], "patternProperties": {"^n": {"type": "integer"}}},
     ['{"n1":2}'], ['{"n1":"2"}', '{"m":2}']),
    ({"type": "object", "required": ["a"], "minProperties": 2}, ['{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"a":2}']),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, ['{"a":1}'], ["{}", '{"a":1,"b":2,"c":3}']),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, ["[1]", "[1,2]"],
     ["[]", "[1,2,3]", '["1"]']),
    ({"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "type": "array"}, ['["a",1]'],
     ['["a","b"]', '["a",1,2]']),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ['"x"', "null"], ["1"]),
    ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"x"', "1"], ["null"]),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["3", "5"], ["2", "6"]),
    ({"$defs": {"node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"},
     {"type": "null"}]}}, "required": ["next"], "additionalProperties": False}}, "$ref": "#/$defs/node"},
     ['{"next":{"next":null}}'], ["{}", '{"next":{"next":1}}']),
    ({"type": "string", "format": "date"}, ['"2026-02-28"'], ['"2026-2-28"', '"x"']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123"']),
    ({"type": ["integer", "null"]}, ["null", "4"], ['"4"']),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "unknownKeyword": 3}, ['{"a":1}'], ['{"a":"x"}']),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # Python warns about [[ and && in patterns
@pytest.mark.parametrize(("schema", "valid", "invalid"), ENFORCED, ids=lambda value: str(value)[:40])
def test_a_schema_is_enforced(schema: object, valid: list[str], invalid: list[str]) -> None:
    grammar = compile_grammar(json=schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for text in valid:
        assert validator.is_valid(json.loads(text)), "the case itself is wrong"
        assert accepts(grammar, text), text
    for text in invalid:
        assert not accepts(grammar, text), text


def test_whitespace_of_patterns_is_that_of_ecmascript() -> None:
    """Whitespace in Python and in Rust differs from ECMAScript's, and from each other."""
    for pattern in (r"^\s$", r"^[\sx]$", r"^[^\S]$"):
        grammar = compile_grammar(json={"type": "string", "pattern": pattern})
        found = [char for char in "\ufeff\u0085\u2028\u00a0\u3000 a\u200b" if accepts(grammar, f'"{char}"')]
        assert found == ["\ufeff", "\u2028", "\u00a0", "\u3000", " "], pattern
        assert accepts(grammar, r'"\t"')
    for pattern in (r"^\S$", r"^[\S]$", r"^[^\s]$"):
        grammar = compile_grammar(json={"type": "string", "pattern": pattern})
        found = [char for char in "\ufeff\u0085\u2028 a\u200b\U0001f600!" if accepts(grammar, f'"{char}"')]
        assert found == ["\u0085", "a", "\u200b", "\U0001f600", "!"], pattern
        assert not accepts(grammar, r'"\t"')


def test_whitespace() -> None:
    value = {"a": [1, {"b": [2]}]}
    bounded = compile_grammar(json={})
    for text in (json.dumps(value), json.dumps(value, indent=8), json.dumps(value, separators=(",", ":"))):
        assert accepts(bounded, text)
    for text in ('{  "a":1}', '{\n\n"a":1}', "{\n" + " " * 41 + '"a":1}', ' {"a":1}', '{"a":1}\n'):
        assert not accepts(bounded, text)
    none = compile_grammar(json_object=True, disable_any_whitespace=True)
    assert accepts(none, '{"a":[1,2]}') and not accepts(none, '{"a": 1}')
    assert not accepts(none, "[]")
    own = compile_grammar(json={}, whitespace_pattern="[ ]{2}")
    assert accepts(own, '{  "a":1}') and not accepts(own, '{ "a":1}')


def test_disable_additional_properties() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    closed = compile_grammar(json=schema, disable_additional_properties=True)
    assert accepts(compile_grammar(json=schema), '{"a":{"b":1,"c":2},"d":3}')
    assert accepts(closed, '{"a":{"b":1}}')
    assert not accepts(closed, '{"a":{"c":2}}') and not accepts(closed, '{"d":3}')
    elsewhere = {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": schema}}}
    closed = compile_grammar(json=elsewhere, disable_additional_properties=True)
    assert accepts(closed, '{"a":{"b":1}}')
    assert not accepts(closed, '{"a":{"c":2}}') and not accepts(closed, '{"d":3}')


def test_schemas_in_other_grammars_are_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    part = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": schema}, "end": ">"}
    for wanted in (
        {"grammar": f'start: "<" %json {json.dumps(schema)} ">"  // "'},
        {"grammar": f'start: "<" a b\na: %lark {{\nstart: %json{json.dumps(schema, indent=2)}\n}}\nb: />/'},
        {"structural_tag": {"type": "structural_tag", "format": part}},
    ):
        grammar = compile_grammar(**wanted)
        assert accepts(grammar, '<{"a":1,"b":"x"}>'), wanted
        assert not accepts(grammar, '<{"a":1,"\\u0061":"x"}>'), wanted
    for grammar, message in (
        ("start: %json {", "malformed"),
        ('start: %json {"items": {"extends": {}}}', "grammar at #/items: extends: extends is not supported"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            compile_grammar(grammar=grammar)
