"""Branches of a oneOf that no value can satisfy together."""

from __future__ import annotations

import json
import time

import jsonschema
import pytest

from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.structured_output.disjoint import DisjointSchemas
from support.grammars import accepts, compile_grammar

DEFINITIONS: dict[str, object] = {
    "text": {"type": "string", "maxLength": 3},
    "none": {"$ref": "#/$defs/null"},
    "null": {"type": "null"},
    "circle": {"type": "object", "properties": {"kind": {"const": "circle"}, "r": {"type": "integer"}},
               "required": ["kind", "r"]},
    "square": {"type": "object", "properties": {"kind": {"$ref": "#/$defs/square_kind"}, "side": {"type": "integer"}},
               "required": ["kind", "side"]},
    "square_kind": {"enum": ["square", "rectangle"]},
    "list": {"type": "array", "items": {"$ref": "#/$defs/list"}},
}  # fmt: skip
TEXTS = [
    "null", "5", '"abc"', '"abcd"', "[]", "[[],[]]", "[1]", '{"kind":"circle","r":1}', '{"kind":"square","side":1}',
    '{"kind":"circle","side":1}', '{"a":1}', '{"a":1,"b":2}', '{"b":2}', "{}",
]  # fmt: skip


def ref(name: str) -> dict[str, object]:
    return {"$ref": f"#/$defs/{name}"}


DISJOINT: dict[str, tuple[object, ...]] = {
    "types": (ref("text"), ref("none")),
    "types of several": (ref("text"), ref("none"), ref("list"), {"type": "integer"}),
    "a discriminator": (ref("circle"), ref("square"), ref("null")),
    "types under anyOf": ({"anyOf": [ref("text"), ref("null")]}, {"anyOf": [ref("list"), ref("circle")]}),
    "types under allOf": ({"allOf": [ref("text"), {"minLength": 1}]}, ref("null")),
    "values": ({"enum": ["abc", None]}, {"const": 5}, ref("list")),
    "a key that the other one excludes": (
        {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
        {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": False},
    ),
    "false": (ref("text"), False),
}
OVERLAPPING: dict[str, tuple[object, ...]] = {
    "integers are numbers": ({"type": "integer"}, {"type": "number"}),
    "1 is 1.0": ({"enum": [1]}, {"const": 1.0}),
    "lengths": (ref("text"), {"type": "string"}),
    "an optional discriminator": (
        {"type": "object", "properties": {"kind": {"const": 1}}},
        {"type": "object", "properties": {"kind": {"const": 2}}},
    ),
    "a discriminator of objects only": (
        {"properties": {"kind": {"const": 1}}, "required": ["kind"]},
        {"properties": {"kind": {"const": 2}}, "required": ["kind"]},
    ),
    "additionalProperties beside patternProperties": (
        {"type": "object", "required": ["a"]},
        {"type": "object", "patternProperties": {"a": {}}, "additionalProperties": False},
    ),
    "true": (True, ref("text")),
    "a reference to nowhere": (ref("nowhere"), ref("text")),
    "references in a circle": ({"allOf": [ref("circular")]}, ref("text")),
}


@pytest.mark.parametrize("name", DISJOINT)
def test_one_of_disjoint_ways_is_enforced(name: str) -> None:
    schema = {"oneOf": list(DISJOINT[name]), "$defs": DEFINITIONS}
    grammar = compile_grammar(json=schema)
    validator = jsonschema.Draft202012Validator(schema)
    for text in TEXTS:
        assert accepts(grammar, text) == validator.is_valid(json.loads(text)), text


@pytest.mark.parametrize("name", OVERLAPPING)
def test_ways_that_may_overlap_are_not_disjoint(name: str) -> None:
    circle = {"circular": {"anyOf": [{"$ref": "#/$defs/circular"}]}}
    disjoint = DisjointSchemas({"$defs": {**DEFINITIONS, **circle}})
    one, other = OVERLAPPING[name]
    assert not disjoint.check(one, other) and not disjoint.check(other, one)


def test_what_stands_beside_a_reference_and_const_in_draft_4_prove_nothing() -> None:
    disjoint = DisjointSchemas({"$defs": {"any": {}}})
    assert not disjoint.check({"$ref": "#/$defs/any", "type": "null"}, {"type": "string"})
    old = DisjointSchemas({"$schema": "http://json-schema.org/draft-04/schema#"})
    assert not old.check({"const": 1}, {"const": 2}) and old.check({"enum": [1]}, {"enum": [2]})


def test_the_work_is_bounded() -> None:
    deep: object = {"type": "string"}
    for _ in range(6):
        deep = {"anyOf": [deep] * 30}
    began = time.thread_time()
    assert not DisjointSchemas({}).check(deep, deep)
    many = DisjointSchemas({})
    assert not many.check({"enum": list(range(60_000))}, {"enum": [-1]})
    assert time.thread_time() - began < 2


def test_a_reference_into_one_of_keeps_it() -> None:
    ways: list[object] = [{"required": ["a"]}, {"required": ["b"]}]
    schema = {"type": "object", "properties": {"c": {"$ref": "#/oneOf/0"}}, "oneOf": ways}
    with pytest.raises(InvalidRequest, match="oneOf"):
        compile_grammar(json=schema)
