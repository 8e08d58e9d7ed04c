"""Bounds and divisors of numbers, limited to ranges for which llguidance's regular expressions are right.

Between bounds, llguidance writes decimals without exponents. This module works around two faults. Next to a bound less
than 1 away, llguidance treats an exclusive bound at an integer as inclusive. And it requires as many decimal places as
the bound or the divisor has: 0.90 below 0.95, 0.50 for multiples of 0.25.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from decimal import ROUND_DOWN, Decimal
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import NamedTuple

from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.float_texts import count_places, find_divisor, is_read_exactly, to_decimal
from serve_llm.server.structured_output.schema_walk import ANNOTATIONS, Schema, Subschema, add_part

MAX_DECIMAL_PLACES = 60  # llguidance's expression has one group per digit of a bound

_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
BOUNDS = (*_LOWER, *_UPPER)
_NEAREST_TO_ZERO = 10.0**-MAX_DECIMAL_PLACES
_OTHER_TYPES = ("null", "boolean", "object", "array", "string")
_MAX_PRODUCT = 2**32 - 1  # llguidance multiplies divisors, scaled to integers, without an overflow check
_MERGED = ("$ref", "anyOf", "oneOf")  # together with the keywords next to them
_NEVER_MERGED = frozenset(("$defs", "$id", "$schema", "definitions", "id"))


class Bound(NamedTuple):
    value: Decimal
    is_exclusive: bool


class NumberRewriter:
    """Rewrites the subschemas of one schema in place. Methods raise GrammarError."""

    def __init__(self, children: list[Subschema]) -> None:
        """children: all subschemas. Any two of them may be merged, for example by `allOf`."""
        schemas = [child.schema for child in children if isinstance(child.schema, dict)]
        self._below_an_upper = set(map(math.floor, _list_fractions(schemas, _UPPER)))
        self._above_a_lower = set(map(math.ceil, _list_fractions(schemas, _LOWER)))
        if any(map(_merges, schemas)):
            _check_merged_divisors(children)

    def rewrite(self, schema: Schema) -> None:
        """Rewrite one subschema. Errors have the keyword and no place."""
        named = schema.get("type", "number")
        types = named if isinstance(named, list) else [named]
        if "number" in types or "integer" in types:
            self._rewrite_ranges(schema, is_integer="number" not in types)
        _write_divisor(schema)

    def _rewrite_ranges(self, schema: Schema, *, is_integer: bool) -> None:
        lower = _read_bound(schema, _LOWER, max)
        upper = _read_bound(schema, _UPPER, min)
        divisor = _read_divisor(schema)
        if lower and upper and divisor:
            step = Fraction(divisor.numerator) if is_integer else divisor
            if not _has_multiple(lower, upper, step):
                add_part(schema, {"type": list(_OTHER_TYPES)})
        if is_integer:
            return
        if lower and lower.is_exclusive and lower.value >= 0 and lower.value in self._below_an_upper:
            lower = _set_bound(schema, _LOWER, _step_off(lower.value, math.inf))
        if upper and upper.is_exclusive and upper.value <= 0 and upper.value in self._above_a_lower:
            upper = _set_bound(schema, _UPPER, _step_off(upper.value, -math.inf))
        kept = {keyword: schema[keyword] for keyword in BOUNDS if keyword in schema}
        ways: list[Schema] = [kept]
        if divisor:
            ways = [{**kept, "multipleOf": _to_number(coarser)} for coarser in _list_divisors(divisor)]
        if points := _list_points(lower, upper, divisor):
            ways.append({"enum": points})
        if len(ways) > 1:
            for keyword in (*BOUNDS, "multipleOf"):
                schema.pop(keyword, None)
            for way in ways:
                _write_divisor(way)
            add_part(schema, {"anyOf": ways})


def is_number(value: object) -> bool:
    return type(value) in (int, float)


def _list_fractions(schemas: Iterable[Schema], keywords: Iterable[str]) -> Iterator[float]:
    for schema in schemas:
        for keyword in keywords:
            value = schema.get(keyword)
            if isinstance(value, float) and not value.is_integer():
                yield value


def _merges(schema: Schema) -> bool:
    beside = set(schema) - ANNOTATIONS - _NEVER_MERGED
    return "allOf" in schema or (len(beside) > 1 and not beside.isdisjoint(_MERGED))


def _check_merged_divisors(children: list[Subschema]) -> None:
    """Refuse divisors whose least common multiple llguidance would compute wrong."""
    places: dict[Fraction, str] = {}
    for child in children:
        divisor = _read_divisor(child.schema) if isinstance(child.schema, dict) else None
        for coarser in _list_divisors(divisor) if divisor else ():
            places.setdefault(coarser, child.pointer)
    for one, other in combinations_with_replacement(places, 2):
        scale = 10 ** max(count_places(one), count_places(other))
        if one * scale * other * scale > _MAX_PRODUCT:
            message = f"multiples of both {_to_number(one)} and {_to_number(other)} cannot be enforced"
            raise GrammarError(message, places[other], "multipleOf")


def _read_bound(
    schema: Schema, keywords: tuple[str, str], choose: Callable[[Decimal, Decimal], Decimal]
) -> Bound | None:
    """Return the bound that two keywords define together. In draft 4, the second is a boolean about the first."""
    inclusive, exclusive = (schema.get(keyword) for keyword in keywords)
    if exclusive is True:
        exclusive = inclusive
    bounds = [to_decimal(value) for value in (inclusive, exclusive) if is_number(value)]  # type: ignore[arg-type]
    if not bounds:
        return None
    value = choose(bounds[0], bounds[-1])
    return Bound(value, is_number(exclusive) and bounds[-1] == value)


def _set_bound(schema: Schema, keywords: tuple[str, str], value: float) -> Bound:
    for keyword in keywords:
        schema.pop(keyword, None)
    schema[keywords[0]] = value
    return Bound(to_decimal(value), is_exclusive=False)


def _step_off(integer: Decimal, towards: float) -> float:
    """Return the nearest number that can be written on one side of an integer."""
    if not integer:
        return math.copysign(_NEAREST_TO_ZERO, towards)
    stepped = math.nextafter(float(integer), towards)
    while not is_read_exactly(stepped):
        stepped = math.nextafter(stepped, towards)
    return stepped


def _read_divisor(schema: Schema) -> Fraction | None:
    value = schema.get("multipleOf")
    return Fraction(to_decimal(value)) if is_number(value) and value else None  # type: ignore[arg-type]


def _list_divisors(divisor: Fraction) -> list[Fraction]:
    """List the divisor, and its multiples with fewer decimal places."""
    places = range(1, count_places(divisor))
    return list(dict.fromkeys([divisor, *(_find_common_multiple(divisor, Fraction(1, 10**count)) for count in places)]))


def _find_common_multiple(one: Fraction, other: Fraction) -> Fraction:
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))


def _has_multiple(lower: Bound, upper: Bound, divisor: Fraction) -> bool:
    least = -(-Fraction(lower.value) // divisor) * divisor
    if lower.is_exclusive and least == lower.value:
        least += divisor
    return _is_within(least, None, upper)


def _is_within(value: Fraction | Decimal, lower: Bound | None, upper: Bound | None) -> bool:
    if lower and (value < lower.value or (lower.is_exclusive and value == lower.value)):
        return False
    return not (upper and (value > upper.value or (upper.is_exclusive and value == upper.value)))


def _list_points(lower: Bound | None, upper: Bound | None, divisor: Fraction | None) -> list[float]:
    """List numbers within bounds that llguidance does not write, or not in the usual way.

    They begin as a bound does and have fewer decimal places. With a divisor, floats may exclude the bounds themselves.
    """
    bounds = [bound.value for bound in (lower, upper) if bound]
    places = [count_places(Fraction(value)) for value in bounds]
    if max(places, default=0) < (1 if divisor and divisor.denominator > 1 else 2):
        return []
    points = set()
    for value, count in zip(bounds, places, strict=True):
        points.add(value)
        points.update(value.quantize(Decimal(1).scaleb(-shorter), ROUND_DOWN) for shorter in range(1, count))
    return [
        float(point)
        for point in sorted(points)
        if _is_within(point, lower, upper)
        and to_decimal(float(point)) == point
        and is_read_exactly(float(point))
        and (Fraction(point) % divisor == 0 if divisor else point % 1)
    ]


def _to_number(value: Fraction) -> float:
    return int(value) if value.denominator == 1 else float(value)


def _write_divisor(schema: Schema) -> None:
    """Replace a divisor from which llguidance would derive another one."""
    divisor = schema.get("multipleOf")
    if not isinstance(divisor, float):
        return
    written = find_divisor(divisor)
    if written is None:
        raise GrammarError(f"{divisor} cannot be enforced without rounding", keyword="multipleOf")
    schema["multipleOf"] = written
