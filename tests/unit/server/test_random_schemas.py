"""Random schemas: a grammar accepts exactly the values that jsonschema finds valid."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from support.grammars import accepts, compile_grammar
from support.random_schemas import build_schema, build_value, change_value

NUM_SCHEMAS = 80
NUM_VALUES = 8  # per schema: valid ones, and as many with one to three changes


@pytest.mark.parametrize("number", range(NUM_SCHEMAS))
def test_a_grammar_and_a_validator_agree(number: int) -> None:
    chooser = random.Random(number)
    schema = build_schema(chooser)
    validator = jsonschema.Draft202012Validator(schema)
    grammar = compile_grammar(json=schema)
    for _ in range(NUM_VALUES):
        value = build_value(chooser, schema)
        assert validator.is_valid(value), "the generator is wrong"
        assert accepts(grammar, json.dumps(value, ensure_ascii=False)), value
        for _ in range(chooser.randint(1, 3)):
            value = change_value(chooser, value)
        assert accepts(grammar, json.dumps(value, ensure_ascii=False)) == validator.is_valid(value), value
