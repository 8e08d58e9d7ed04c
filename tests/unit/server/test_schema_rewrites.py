"""Keywords that are rewritten as other keywords for llguidance: valid values stay valid, compared with jsonschema."""

from __future__ import annotations

import itertools
import json
import re

import jsonschema
import pytest

from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.structured_output.disjoint import DisjointSchemas
from serve_llm.server.structured_output.negation import negate
from serve_llm.server.structured_output.text_complement import negate_pattern, negate_texts
from support.grammars import accepts, compile_grammar
from support.matrix import mostly_slow

OBJECTS = [
    dict(zip(names, values, strict=True))
    for count in range(4)
    for names in itertools.combinations("abc", count)
    for values in itertools.product((1, "x"), repeat=count)
]
VALUES = [*OBJECTS, None, True, False, 5, 1, 2.5, "text", "", "x", "xy", [1], [], ["x", 1]]

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
    "not anything": {"properties": {"a": {"not": {}}, "b": {"not": {"title": "b"}}}},
    "not nothing": {"not": False},
    "not const": {"not": {"const": "x"}},
    "not enum": {"not": {"enum": ["x", "text", 5, 1, None, True]}},
    "not enum, of a string": {"type": "string", "not": {"enum": ["x", ""]}},
    "not enum, of an integer": {"type": "integer", "not": {"enum": [5, 7]}},
    "not properties": {"not": {"properties": {"a": {"type": "string"}, "c": {"const": "x"}}}},
    "not properties, required": {"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}},
    "not bounds": {"not": {"minimum": 2, "maximum": 4.5}},
    "not exclusive bounds": {"type": "number", "not": {"exclusiveMinimum": 2, "exclusiveMaximum": 5}},
    "not lengths": {"not": {"minLength": 1, "maxLength": 2}},
    "not numbers of items": {"not": {"minItems": 1, "maxItems": 1}},
    "not minProperties": {"not": {"minProperties": 1}},
    "not contains": {"not": {"contains": {"type": "string"}}},
    "not pattern": {"not": {"pattern": "^x"}},
    "not a reference": {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"enum": ["x", 1]}}},
    "not oneOf": {"not": {"oneOf": [{"type": "string"}, {"minimum": 2}, {"minLength": 2}]}},
    "not, a word that is no keyword": {"not": {"const": "x", "markdownDescription": "x"}},
    "if, a constant": {
        "type": "object",
        "properties": {"a": {"enum": [1, "x"]}, "b": {}},
        "if": {"properties": {"a": {"const": "x"}}, "required": ["a"]},
        "then": {"required": ["b"]},
        "else": {"properties": {"b": {"type": "integer"}}},
    },
    "if without else": {"if": {"type": "string"}, "then": {"minLength": 2}},
    "if without then": {"if": {"required": ["a"]}, "else": {"type": "object", "required": ["b"]}},
    "if in then": {
        "if": {"required": ["a"]},
        "then": {"if": {"required": ["b"]}, "then": {"properties": {"b": {"const": 1}}}, "else": {"required": ["c"]}},
    },
    "if true": {"if": True, "then": {"type": "string"}, "else": False},
    "if false": {"if": {"not": {}}, "then": False, "else": {"type": "string"}},
    "oneOf with an overlap": {"oneOf": [{"type": "string"}, {"enum": ["x", 1, None]}]},
    "oneOf of ranges": {"type": "number", "oneOf": [{"minimum": 2}, {"maximum": 3}]},
    "oneOf of properties": {
        "oneOf": [
            {"properties": {"a": {"type": "number"}}, "required": ["a"]},
            {"properties": {"b": {"type": "string"}}, "required": ["b"]},
        ]
    },
    "oneOf of closed objects": {
        "type": "object",
        "oneOf": [
            {"properties": {"a": {"const": 1}, "b": {}}, "additionalProperties": False},
            {"properties": {"a": {"type": ["string", "number"]}, "c": {}}, "additionalProperties": False},
        ],
    },
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
    "propertyNames, several keywords": {
        "type": "object",
        "propertyNames": {"type": "string", "pattern": "^[ab]+$", "minLength": 1, "maxLength": 3, "title": "n"},
    },
    "propertyNames, characters": {"propertyNames": {"pattern": "^[ab][a-c]*$", "maxLength": 1}},
    "propertyNames, too short": {"type": "object", "propertyNames": {"pattern": "^[a-c]$", "minLength": 2}},
    "propertyNames, constants of a pattern": {"propertyNames": {"enum": ["a", "b", "cc"], "pattern": "^[b-z]+$"}},
    "propertyNames, constants of a length": {"propertyNames": {"enum": ["a", "b", "cc"], "maxLength": 1}},
    "propertyNames, constants twice": {"propertyNames": {"enum": ["a", "b"], "const": "b"}},
    "propertyNames, not": {"type": "object", "propertyNames": {"not": {"enum": ["a", "bb"]}, "type": "string"}},
    "propertyNames, not a pattern": {"type": "object", "propertyNames": {"not": {"pattern": "^[ab]"}}},
    "propertyNames, anyOf": {"propertyNames": {"anyOf": [{"const": "a"}, {"pattern": "^b"}]}},
    "propertyNames, oneOf": {"propertyNames": {"oneOf": [{"enum": ["a", "c"]}, {"pattern": "^b$"}, {"type": "null"}]}},
    "propertyNames, allOf": {
        "propertyNames": {"allOf": [{"pattern": "^[a-b]*$", "maxLength": 4}, True, {"type": "string"}]}
    },
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
    "not enum",
    "not properties",
    "not pattern",
    "if, a constant",
    "if in then",
    "oneOf of closed objects",
    "propertyNames, several keywords",
    "propertyNames, not",
    "propertyNames, oneOf",
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
    """Return the value as JSON in all orders of its properties: a grammar requires the order in which the schema names
    them."""
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
    [{"pattern": "^a", "minLength": 2}, {"format": "regex"}, {"pattern": "^(ab)*$", "maxLength": 4}, {"not": {"format":
     "date"}}, {"oneOf": [{"const": "a"}, {"enum": ["a", "b"]}]}, {"pattern": "a", "allOf": [{"pattern": "b"}]},
     {"anyOf": [{"pattern": "^a|b$"}, {"const": "c"}]}, {"enum": ["a"], "pattern": r"^\w$"}, {"$ref": "other.json"},
     {"$ref": "#/$defs/a", "minLength": 1}, {"maxLength": -1}, {"pattern": "^[a-z]+[0-9]+$", "maxLength": 9}],
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
    [{"type": "integer"}, {"const": 1.5}, {"const": 2**53}, {"enum": [[1]]}, {"const": {}}, {"required": []},
     {"required": True}, {"anyOf": [{"type": "null"}, {"format": "date"}]}, {"pattern": "a+b"}, {"multipleOf": 2},
     {"items": {}}, {"$ref": "#/nowhere"}, {"$ref": "#", "type": "null"}, {"additionalProperties": False}, 5,
     {"properties": {"a": {"uniqueItems": True}}}, {"minLength": -1}, {"contains": {}, "minContains": 2},
     {"if": {}, "then": False}, {"const": "x" * 200}, {"not": 5}, {"type": "strin"},
     {"minimum": 1, "exclusiveMinimum": True}, {"maximum": 2**53}, {"maxProperties": 1}],
)  # fmt: skip
def test_what_cannot_be_negated_is_left(schema: object) -> None:
    assert negate(schema, DisjointSchemas({})) is None


def test_nothing_and_anything_are_negated() -> None:
    types = ["null", "boolean", "object", "array", "number", "string"]
    for schema in (True, {}, {"title": "x"}, {"properties": {}}, {"type": types}, {"minLength": 0}, {"$defs": {}}):
        assert negate(schema, DisjointSchemas({})) is False, schema
    for schema in (False, {"not": True}, {"anyOf": [False]}, {"allOf": [{}, False]}):
        assert negate(schema, DisjointSchemas({})) is True, schema


def test_an_endless_reference_is_not_negated() -> None:
    root: dict[str, object] = {"$defs": {"a": {"not": {"$ref": "#/$defs/b"}}, "b": {"anyOf": [{"$ref": "#/$defs/b"}]}}}
    assert negate({"$ref": "#/$defs/b"}, DisjointSchemas(root)) is None


@pytest.mark.parametrize("draft", ["draft-03", "draft-04"])
def test_words_that_an_old_draft_does_not_know_are_not_negated(draft: str) -> None:
    disjoint = DisjointSchemas({"$schema": f"http://json-schema.org/{draft}/schema#"})
    assert negate({"const": 1}, disjoint) is None and negate({"contains": {}}, disjoint) is None


def test_if_is_no_keyword_before_draft_7() -> None:
    schema = {"if": {"type": "null"}, "then": False}
    assert accepts(compile_grammar(json={"$schema": "http://json-schema.org/draft-04/schema#", **schema}), "null")
    assert not accepts(compile_grammar(json={"$schema": "http://json-schema.org/draft-07/schema#", **schema}), "null")


def test_coerce_one_of_is_anyof_where_ways_overlap() -> None:
    ways = {"oneOf": [{"type": "string"}, {"enum": ["x", 1]}]}
    assert not accepts(compile_grammar(json=ways), '"x"')
    assert accepts(compile_grammar(json={**ways, "x-guidance": {"coerce_one_of": True}}), '"x"')


PATTERNS = ["^x$", "^(?:x|yx)$", "^(x|)$", "^x", "^(xy|y)", "^[xy]$", "^[xy]+$", "^[^x]*$", "[xy]", "x+", r"\.", 
            r"^\d+$", "^x+", r"^\$", r"^\.$"]  # fmt: skip


def write_texts(alphabet: str, most: int) -> list[str]:
    return ["".join(chars) for size in range(most + 1) for chars in itertools.product(alphabet, repeat=size)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_opposite_of_a_pattern(pattern: str) -> None:
    opposite = negate_pattern(pattern)
    assert opposite is not None
    for text in [*write_texts("xy.1$", 3), "\u00e9x", "\u2028"]:
        assert bool(re.search(opposite, text)) != bool(re.search(pattern, text)), text


@pytest.mark.parametrize(
    "pattern", ["", "^", "$", "x$", "^xy+$", "xy", "x*", "^x|y$", "^(x)(y)$", "^.$", "^x{2}$", r"\b", "^"]
)
def test_the_opposite_of_another_pattern_is_not_known(pattern: str) -> None:
    assert negate_pattern(pattern) is None


def test_all_texts_but_some() -> None:
    texts = write_texts("ab]^-\\", 2)
    for some in (["a"], ["", "ab"], ["]", "^-", "\\"], texts[5:20]):
        pattern = negate_texts(some)
        assert pattern is not None
        assert [text for text in [*texts, "abc"] if not re.search(pattern, text)] == [
            one for one in texts if one in some
        ]
    assert negate_texts(["x" * 101]) is None and negate_texts([""], and_longer=True) is None


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
