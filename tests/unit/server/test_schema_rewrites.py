"""Keywords that are written in others before they reach llguidance: what is valid stays so, as jsonschema judges."""

from __future__ import annotations

import itertools
import json
import re

import jsonschema
import pytest

from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.structured_output.schema_rewrites import negate
from support.grammars import accepts, compile_grammar
from support.matrix import mostly_slow

OBJECTS = [
    dict(zip(names, values, strict=True))
    for count in range(4)
    for names in itertools.combinations("abc", count)
    for values in itertools.product((1, "x"), repeat=count)
]
VALUES = [*OBJECTS, None, True, 5, "text", [1]]

SCHEMAS: dict[str, object] = {
    "not type": {"not": {"type": "null"}},
    "not types": {"not": {"type": ["object", "number"]}},
    "not integer, of a string": {"type": ["string", "null"], "not": {"type": "integer"}},
    "not integer, of an integer": {"type": ["integer", "boolean"], "not": {"type": ["integer", "string"]}},
    "not number": {"not": {"type": ["number", "integer"]}},
    "not required": {"type": "object", "not": {"required": ["b"]}},
    "not required, several": {"type": "object", "not": {"required": ["a", "b"]}},
    "not required, of any type": {"not": {"required": ["b"]}},
    "not not": {"not": {"not": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
    "not anyOf": {"type": "object", "not": {"anyOf": [{"required": ["a"]}, {"required": ["c"]}]}},
    "not allOf": {"not": {"allOf": [{"type": "object"}, {"required": ["c"]}]}},
    "not, two keywords": {"not": {"type": "object", "required": ["c"], "title": "with c"}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"], "c": ["a"]}},
    "dependentRequired of any type": {"dependentRequired": {"a": ["b", "c"]}},
    "dependentRequired, closed": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "dependentRequired": {"a": ["b"]},
        "additionalProperties": False,
    },
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
    "oneOf required": {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}]},
    "oneOf required, several": {"oneOf": [{"required": ["a", "b"]}, {"required": ["c"]}]},
    "propertyNames, a pattern": {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    "propertyNames, beside properties": {
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"type": "string"},
        "propertyNames": {"enum": ["a", "c", "x\n y", 5]},
    },
    "propertyNames, a reference": {
        "$defs": {"Name": {"$ref": "#/$defs/Letter", "title": "n"}, "Letter": {"enum": ["a", "c"], "type": "string"}},
        "propertyNames": {"$ref": "#/$defs/Name"},
        "additionalProperties": {"type": "integer"},
    },
    "propertyNames, const": {"type": "object", "propertyNames": {"const": "b"}},
    "propertyNames, lengths": {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 1}},
    "propertyNames, too long": {"type": "object", "propertyNames": {"type": "string", "minLength": 2}},
    "propertyNames, no length": {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 1}},
    "propertyNames, false": {"properties": {"a": {}}, "propertyNames": False},
    "propertyNames, of another type": {"type": "object", "propertyNames": {"type": "integer"}},
    "propertyNames, a format of nobody": {"type": "object", "propertyNames": {"format": "letter"}},
    "propertyNames, any": {"type": "object", "propertyNames": {"type": "string"}},
    "minProperties 1, open": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "minProperties": 1},
    "minProperties 1, a property that must not be": {"properties": {"a": False, "b": {}}, "minProperties": 1},
    "minProperties 1, required": {"properties": {"a": {}, "b": {}}, "required": ["b"], "minProperties": 1},
    "a format of nobody": {"type": "string", "format": "password"},
    "a format of draft 3": {"type": "string", "format": "phone"},
    "another format of draft 3": {"anyOf": [{"format": "color"}, {"format": "style"}, {"format": "utc-millisec"}]},
}
FAST = (
    "not types",
    "not required",
    "not anyOf",
    "dependentRequired",
    "dependentSchemas",
    "oneOf required",
    "propertyNames, a pattern",
    "propertyNames, a reference",
    "propertyNames, lengths",
    "a format of draft 3",
    "minProperties 1, required",
    "dependencies, one name",
)
OLD_SCHEMAS: dict[str, object] = {
    "dependencies": {"type": "object", "dependencies": {"a": ["b"], "b": {"properties": {"c": {"type": "integer"}}}}},
    "dependencies, one name": {"type": "object", "dependencies": {"a": "b"}},
}


def write_in_all_orders(value: object) -> list[str]:
    """A grammar wants the properties that a schema names in its order."""
    if not isinstance(value, dict):
        return [json.dumps(value)]
    return [json.dumps(dict(order)) for order in itertools.permutations(value.items())]


@pytest.mark.parametrize("name", mostly_slow([*SCHEMAS, *OLD_SCHEMAS], FAST))
def test_a_rewritten_schema_means_the_same(name: str) -> None:
    schema = SCHEMAS.get(name, OLD_SCHEMAS.get(name))
    draft = jsonschema.Draft202012Validator if name in SCHEMAS else jsonschema.Draft3Validator
    validator = draft(schema)
    grammar = compile_grammar(json=schema)
    for value in VALUES:
        accepted = [text for text in write_in_all_orders(value) if accepts(grammar, text)]
        assert bool(accepted) == validator.is_valid(value), value


def test_names_of_properties_are_of_a_format() -> None:
    grammar = compile_grammar(json={"type": "object", "propertyNames": {"type": "string", "format": "uuid"}})
    assert accepts(grammar, '{"123e4567-e89b-12d3-a456-426614174000":1}') and not accepts(grammar, '{"123e4567":1}')
    grammar = compile_grammar(json={"type": "object", "propertyNames": {"enum": ["a.b|c", "é\n"]}})
    assert accepts(grammar, '{"a.b|c":1,"é\\n":2}') and not accepts(grammar, '{"axb|c":1}')
    grammar = compile_grammar(json={"type": "object", "propertyNames": {"maxLength": 2}})
    assert accepts(grammar, '{"é\U0001f600":1,"\\n":2}') and not accepts(grammar, '{"abc":1}')


@pytest.mark.parametrize(
    "names",
    [{"pattern": "^a", "minLength": 2}, {"format": "regex"}, {"anyOf": [{"const": "a"}]}, {"$ref": "other.json"},
     {"$ref": "#/$defs/a", "minLength": 1}, {"maxLength": -1}],
)  # fmt: skip
def test_other_names_of_properties_are_refused(names: object) -> None:
    with pytest.raises(InvalidRequest, match="propertyNames"):
        compile_grammar(json={"type": "object", "propertyNames": names, "$defs": {"a": {}}})


def test_int32_is_a_range_and_the_old_names_of_formats_are_known() -> None:
    grammar = compile_grammar(json={"type": ["integer", "null"], "format": "int32"})
    accepted = [value for value in (-(2**31) - 1, -(2**31), 0, 2**31 - 1, 2**31) if accepts(grammar, str(value))]
    assert accepted == [-(2**31), 0, 2**31 - 1] and accepts(grammar, "null")
    grammar = compile_grammar(json={"type": "string", "format": "ip-address"})
    assert accepts(grammar, '"10.0.0.1"') and not accepts(grammar, '"10.0.0"')


@pytest.mark.parametrize(
    "schema",
    [True, False, {}, {"title": "x"}, {"type": "integer"}, {"const": 1}, {"required": []}, {"required": True},
     {"type": ["null", "boolean", "object", "array", "number", "string"]}, {"not": True},
     {"anyOf": [{"type": "null"}, {"pattern": "x"}]}, {"type": "null", "minLength": 1}],
)  # fmt: skip
def test_what_cannot_be_negated_is_left(schema: object) -> None:
    assert negate(schema) is None


@pytest.mark.parametrize("types", [{}, {"type": "number"}, {"type": ["null", "number"]}])
def test_numbers_that_are_no_integers_are_refused(types: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="not:"):
        compile_grammar(json={**types, "not": {"type": "integer"}})


@pytest.mark.parametrize("pattern", [r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", "^(?![ab]*$)[a-c]{1,3}$"])
def test_a_lookahead_that_excludes_only_some_characters_holds(pattern: str) -> None:
    grammar = compile_grammar(json={"type": "string", "pattern": pattern})
    texts = ["".join(chars) for size in range(4) for chars in itertools.product("+.01abc", repeat=size)]
    assert [text for text in texts if accepts(grammar, f'"{text}"')] == [
        text for text in texts if re.search(pattern, text)
    ]


@pytest.mark.parametrize("pattern", ["^(?![a]*$)a|b", "^(?!a)b", "^(?=[a]*$)a", "(?![a]*$)a"])
def test_other_lookaheads_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="look-around"):
        compile_grammar(json={"type": "string", "pattern": pattern})
