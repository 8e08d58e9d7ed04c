"""Random schemas of `not`, `if`, `oneOf` and `propertyNames`: a grammar never accepts what jsonschema finds invalid,
and accepts what it finds valid, unless the schema is refused."""

from __future__ import annotations

import itertools
import json
import random
import re

import jsonschema
import pytest

from serve_llm.server.http.errors import InvalidRequest
from support.grammars import accepts, compile_grammar
from support.matrix import mostly_slow

NUM_SEEDS = 12
NUM_SCHEMAS = 8  # per seed
TEXTS = ["", "x", "xy", "y", "b", "bb", "ab"]
NUMBERS = [0, 1, 2, -1, 1.5, 0.5, 7]
MEMBERS = [1, "x", None, 0]
OBJECTS = [
    dict(zip(names, values, strict=True))
    for count in range(3)
    for names in itertools.combinations(("a", "b", "bb", "d"), count)
    for values in itertools.product(MEMBERS[:2], repeat=count)
]
VALUES = [None, True, False, *TEXTS, *NUMBERS, [], [1], ["x", 1], {"a": None}, {"b": 0, "c": "x"}, *OBJECTS]
PATTERNS = ["^x$", "^[xy]+$", "^[xy]*$", "x", "^x", "^(x|xy)$", "^(?:a|b)", "[^x]", "b+"]
TYPES = ["null", "boolean", "object", "array", "number", "string"]
NAMES: list[object] = [
    {"pattern": "^[ab]+$", "maxLength": 1},
    {"enum": ["a", "b"], "minLength": 1},
    {"not": {"enum": ["a", "bb"]}},
    {"anyOf": [{"const": "a"}, {"pattern": "^b"}]},
    {"oneOf": [{"enum": ["a", "c"]}, {"const": "b"}]},
]
Schema = dict[str, object]


def build_assertion(chooser: random.Random) -> Schema | bool:
    constants = [*TEXTS, *NUMBERS[:4], None, True, False]
    return chooser.choice(
        [
            {"const": chooser.choice(constants)},
            {"enum": chooser.sample(constants, chooser.randint(1, 4))},
            {"type": chooser.choice([*TYPES, "integer"])},
            {"type": chooser.sample(TYPES, 2)},
            {"minimum": chooser.randint(0, 2)},
            {"maximum": chooser.choice([0, 1.5, 2]), "exclusiveMinimum": chooser.randint(-2, 1)},
            {"minLength": chooser.randint(0, 2)},
            {"maxLength": chooser.randint(0, 2), "maxItems": 1},
            {"minItems": chooser.randint(0, 2)},
            {"pattern": chooser.choice(PATTERNS)},
            {"required": chooser.sample("abc", chooser.randint(1, 2))},
            {"minProperties": 1},
            {"maxProperties": chooser.randint(0, 1)},
            {"propertyNames": chooser.choice(NAMES)},
            {},
            chooser.random() < 0.5,
        ]
    )


def build_schema(chooser: random.Random, depth: int) -> Schema | bool:
    if not depth or chooser.random() < 0.2:
        return build_assertion(chooser)

    def build_parts(least: int, most: int) -> list[Schema | bool]:
        return [build_schema(chooser, depth - 1) for _ in range(chooser.randint(least, most))]

    keyword = chooser.choice(["not", "anyOf", "allOf", "oneOf", "oneOf", "if", "if", "properties", "properties"])
    if keyword == "not":
        return {"not": build_schema(chooser, depth - 1)}
    if keyword == "if":
        return dict(zip(chooser.choice([("if", "then"), ("if", "then", "else"), ("if", "else")]), build_parts(3, 3)))  # noqa: B905
    if keyword == "properties":
        found: Schema = {"properties": dict(zip(chooser.sample("abc", 3), build_parts(1, 3)))}  # noqa: B905
        more: Schema = {"type": "object", "additionalProperties": False, "required": [chooser.choice("abc")]}
        return found | {name: value for name, value in more.items() if chooser.random() < 0.4}
    return {keyword: build_parts(2, 3)}


def write_in_all_orders(value: object) -> list[str]:
    """Return the value as JSON in all orders of its properties: a grammar requires the order in which the schema names
    them."""
    if not isinstance(value, dict):
        return [json.dumps(value)]
    return [json.dumps(dict(order)) for order in itertools.permutations(value.items())]


@pytest.mark.parametrize("seed", mostly_slow(range(NUM_SEEDS), range(3)))
def test_a_grammar_and_a_validator_agree(seed: int) -> None:
    chooser = random.Random(seed)
    num_accepted = 0
    for _ in range(NUM_SCHEMAS):
        schema = build_schema(chooser, 3)
        if isinstance(schema, bool):
            continue
        validator = jsonschema.Draft202012Validator(schema)
        try:
            grammar = compile_grammar(json=schema)
        except InvalidRequest as error:
            assert re.match(r"structured_outputs\.json(?: at #.*?)?: [\w$-]+: ", error.message), (schema, error.message)
            is_unsatisfiable = "nsatisfiable" in error.message or "no text" in error.message
            assert not is_unsatisfiable or not any(map(validator.is_valid, VALUES)), schema
            continue
        num_accepted += 1
        for value in VALUES:
            accepted = any(accepts(grammar, text) for text in write_in_all_orders(value))
            assert accepted == validator.is_valid(value), (schema, value)
    assert num_accepted
