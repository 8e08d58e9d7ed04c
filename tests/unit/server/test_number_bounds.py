"""Bounds and divisors of numbers: what a grammar accepts, compared with exact arithmetic."""

from __future__ import annotations

import random
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

import pytest

from serve_llm.common.grammar import build_matcher
from serve_llm.server.http.errors import InvalidRequest
from support.grammars import accepts, compile_grammar, compiler

Schema = dict[str, float]

BOUNDED: list[tuple[Schema, list[str], list[str]]] = [
    # An exclusive bound at an integer, and another one at a distance below 1.
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.1", "0.00001", "0.49"], ["0", "0.0", "-0", "0.5"]),
    ({"exclusiveMinimum": 0, "maximum": 1e-5}, ["0.00001", "0.000001"], ["0", "0.00002"]),
    ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.1", "1.0001"], ["1", "1.0", "1.5"]),
    ({"exclusiveMinimum": -1.5, "exclusiveMaximum": -1}, ["-1.1", "-1.49"], ["-1", "-1.0", "-1.5"]),
    ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["-0", "0", "-0.0", "-0.6"]),
    ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5, "multipleOf": 0.1}, ["0.1", "0.4"], ["0", "0.0", "0.5", "0.15"]),
    ({"minimum": 0, "exclusiveMinimum": 0, "maximum": 0.5}, ["0.2", "0.5"], ["0"]),
    # Fewer decimal places than the bound has.
    ({"minimum": 0, "maximum": 0.95}, ["0", "0.9", "0.90", "0.95", "0.949"], ["0.96", "0.951", "1"]),
    ({"maximum": 0.57}, ["0.5", "0.57", "-3"], ["0.6", "0.571"]),
    ({"maximum": 42.25}, ["42", "42.2", "42.20", "42.25"], ["42.3", "42.26"]),
    ({"exclusiveMaximum": 42.25}, ["42.2", "42.249"], ["42.25"]),
    ({"minimum": -42.25}, ["-42.2", "-42.25", "7"], ["-42.3"]),
    ({"minimum": 0.5, "maximum": 0.55}, ["0.5", "0.50", "0.55"], ["0.49", "0.56"]),
    # Fewer decimal places than the divisor has.
    ({"multipleOf": 0.25}, ["0.25", "0.5", "1.5", "2.0", "2", "-0.5"], ["0.3", "0.55", "1.1"]),
    ({"multipleOf": 0.1, "minimum": 0.2, "maximum": 0.4}, ["0.3", "0.2", "0.4"], ["0.25", "0.5"]),
    ({"multipleOf": 0.05, "maximum": 0.55}, ["0.5", "0.55", "0.1"], ["0.6", "0.52"]),
]  # fmt: skip


@pytest.mark.parametrize(("bounds", "valid", "invalid"), BOUNDED, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("is_merged", [False, True])
def test_bounds_are_exact(bounds: Schema, valid: list[str], invalid: list[str], is_merged: bool) -> None:
    schema: object = {"type": "number", **bounds}
    if is_merged:
        schema = {"type": "number", "allOf": [{name: value} for name, value in bounds.items()]}
    grammar = compile_grammar(json=schema)
    assert [text for text in [*valid, *invalid] if accepts(grammar, text)] == valid


def test_a_divisor_whose_only_multiple_is_a_bound() -> None:
    grammar = compile_grammar(json={"type": "number", "multipleOf": 0.1, "minimum": 0.25, "maximum": 0.3})
    assert [text for text in ("0.2", "0.25", "0.3", "0.4") if accepts(grammar, text)] == ["0.3"]


def test_exclusive_bounds_of_draft_4_are_exact() -> None:
    grammar = compile_grammar(json={"minimum": 0, "exclusiveMinimum": True, "maximum": 0.75})
    assert [text for text in ("0", "0.0", "0.7", "0.75", '"x"') if accepts(grammar, text)] == ["0.7", "0.75", '"x"']


def test_bounds_in_other_subschemas_that_are_merged() -> None:
    grammar = compile_grammar(
        json={
            "$defs": {"positive": {"type": "number", "exclusiveMinimum": 0}, "small": {"maximum": 0.5}},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/positive", "allOf": [{"$ref": "#/$defs/small"}]}},
        }
    )
    assert accepts(grammar, '{"a": 0.5}') and not accepts(grammar, '{"a": 0}') and not accepts(grammar, '{"a": 0.51}')


def test_no_multiple_between_the_bounds() -> None:
    """Otherwise it would be noticed only in the middle of a text: llguidance computes with floats."""
    empty = {"type": "number", "exclusiveMinimum": 0.3, "exclusiveMaximum": 0.4, "multipleOf": 0.1}
    grammar = compile_grammar(json={"type": "object", "properties": {"a": empty}, "additionalProperties": False})
    assert accepts(grammar, "{}")
    with pytest.raises(InvalidRequest, match="Unsatisfiable"):
        compile_grammar(json={"type": "object", "properties": {"a": empty}, "required": ["a"]})


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"minimum": 1e-70}, "minimum"),
        ({"maximum": 108802.38115548203}, "maximum"),
        ({"const": 6.229818774157778e-10}, "const"),
        ({"enum": [0.5, [6.229818774157778e-10]]}, "enum"),
        ({"multipleOf": 0.57}, "multipleOf"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf"),
        ({"$ref": "#/$defs/a", "multipleOf": 100000, "$defs": {"a": {"multipleOf": 100000}}}, "multipleOf"),
    ],
)
def test_numbers_that_would_be_rounded_are_refused(schema: object, keyword: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"structured_outputs\.json[^:]*: {keyword}: .*cannot be enforced"):
        compile_grammar(json=schema)


def test_divisors_of_different_properties_are_not_merged() -> None:
    grammar = compile_grammar(json={"properties": {"a": {"multipleOf": 100000}, "b": {"multipleOf": 70000}}})
    assert accepts(grammar, '{"a": 300000, "b": 140000}') and not accepts(grammar, '{"b": 100000}')


def draw_schema(numbers: random.Random, *, with_divisor: bool) -> Schema:
    def draw_number() -> float:
        places = numbers.randrange(5)
        if places == 0:
            return numbers.randrange(-3, 4)
        return round(numbers.uniform(-3, 3) if numbers.random() < 0.7 else numbers.uniform(-1, 1), places)

    names = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
    schema = {name: draw_number() for name in numbers.sample(names, numbers.randrange(1, 4))}
    if with_divisor and numbers.random() < 0.5:
        schema["multipleOf"] = numbers.choice([0.25, 0.5, 0.1, 0.05, 1, 0.125, 1.5, 0.3])
    return schema


def is_valid(value: Fraction, schema: Schema) -> bool:
    exact = {name: Fraction(repr(number)) for name, number in schema.items()}
    if "multipleOf" in exact and value % exact["multipleOf"]:
        return False
    return exact.get("minimum", value) <= value <= exact.get("maximum", value) and exact.get(
        "exclusiveMinimum", value - 1
    ) < value < exact.get("exclusiveMaximum", value + 1)


def list_values(schema: Schema) -> Iterator[Fraction]:
    """Yield values near the bounds, with several numbers of decimal places."""
    for name, number in schema.items():
        for places in range(6):
            unit = Fraction(1, 10**places)
            for distance in range(-2, 3):
                near = Fraction(repr(number)) // unit * unit + distance * unit
                yield near
                if name != "multipleOf" and (divisor := schema.get("multipleOf")):
                    yield near // Fraction(repr(divisor)) * Fraction(repr(divisor))


def write(value: Fraction) -> str:
    text = format(Decimal(value.numerator) / value.denominator, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


@pytest.mark.parametrize("is_merged", [False, True])
def test_random_bounds_are_exact(is_merged: bool) -> None:
    numbers = random.Random(7)
    tokenizer = compiler().load_tokenizer()
    for _ in range(60):
        bounds = draw_schema(numbers, with_divisor=not is_merged)
        parts: list[object] = [{name: value} for name, value in bounds.items()]
        values = set(list_values(bounds))
        try:
            grammar = compile_grammar(json={"type": "number", **({"allOf": parts} if is_merged else bounds)})
        except InvalidRequest:
            assert not any(is_valid(value, bounds) for value in values), bounds
            continue
        matcher = build_matcher(tokenizer, grammar)
        for value in values:
            text = write(value)
            wanted = is_valid(value, bounds)
            variants = [text, f"{text}0", f"{text}00"] if "." in text else [text, f"{text}.0", f"-{text}"]
            for variant in variants if value > 0 or "." in text else variants[:2]:
                ids = tokenizer.tokenize_str(variant)
                copy = matcher.deep_copy()
                accepted = copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()
                if variant == text and not variant.startswith("-0"):
                    assert accepted == wanted, (bounds, variant)
                elif accepted:
                    assert is_valid(Fraction(variant), bounds), (bounds, variant)
