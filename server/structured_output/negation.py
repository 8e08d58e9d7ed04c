"""JSON schemas that are valid exactly where another one is not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Set
from itertools import combinations, pairwise

from serve_llm.server.structured_output.disjoint import DisjointSchemas
from serve_llm.server.structured_output.schema_walk import KEYWORDS, Schema, list_members
from serve_llm.server.structured_output.text_complement import negate_pattern, negate_texts

TYPES = ("null", "boolean", "object", "array", "number", "string")
_NEUTRAL = frozenset(("$defs", "definitions"))  # allow every value
_MAX_EXACT = 2**53  # larger integers are rounded
_MAX_REFERENCES = 4  # maximum length of a chain of references

# Keywords of counts: the type to which they apply, the opposite keyword, and what to add to the count.
_COUNTS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


class _Unknown(Exception):
    """There is no known way to write the opposite."""


def negate(schema: object, disjoint: DisjointSchemas, keys: Set[str] | None = None) -> Schema | bool | None:
    """Return a schema that is valid where `schema` is not; None if there is no known way to write it.

    disjoint: knows the whole schema. keys: the only ones that an object has where the result is used.
    """
    try:
        return _Negation(disjoint).negate(schema, keys, _MAX_REFERENCES)
    except _Unknown:
        return None


class _Negation:
    """Methods raise _Unknown. Results share no objects with the schema."""

    def __init__(self, disjoint: DisjointSchemas) -> None:
        self._disjoint = disjoint

    def negate(self, schema: object, keys: Set[str] | None, references_left: int) -> Schema | bool:
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict):
            raise _Unknown
        self._spend(1)
        keywords = [keyword for keyword in schema if keyword in KEYWORDS and keyword not in _NEUTRAL]
        if "$ref" in keywords:
            targets = list(self._disjoint.resolve(schema))
            if len(keywords) > 1 or len(targets) != 1 or not references_left:
                raise _Unknown
            return self.negate(targets[0], keys, references_left - 1)

        def negate_part(part: object) -> Schema | bool:
            return self.negate(part, keys, references_left)

        parts: list[Schema | bool] = []
        if "additionalProperties" in keywords:
            keywords.remove("additionalProperties")
            parts.append(_negate_closed(schema, keys))
        for keyword in keywords:
            parts.append(self._negate_keyword(keyword, schema[keyword], negate_part, references_left))
        return join("anyOf", parts)

    def _negate_keyword(
        self, keyword: str, value: object, negate_part: Callable[[object], Schema | bool], references_left: int
    ) -> Schema | bool:
        if keyword == "not":
            return self._copy(value)
        if keyword == "type":
            return _negate_types(value)
        if keyword in ("anyOf", "allOf") and isinstance(value, list):
            return join("allOf" if keyword == "anyOf" else "anyOf", [negate_part(part) for part in value])
        if keyword == "oneOf" and isinstance(value, list):
            several: list[Schema | bool] = [
                {"allOf": [self._copy(one), self._copy(other)]}
                for one, other in combinations(value, 2)
                if not self._disjoint.check(one, other)
            ]
            return join("anyOf", [join("allOf", [negate_part(part) for part in value]), *several])
        if keyword == "required" and are_names(value):
            assert isinstance(value, list)
            missing: list[Schema | bool] = [{"properties": {name: False}} for name in value]
            return join("allOf", [{"type": "object"}, join("anyOf", missing)])
        if keyword == "properties" and isinstance(value, dict):
            return join("anyOf", [self._negate_member(name, part, references_left) for name, part in value.items()])
        if keyword == "contains" and isinstance(value, dict | bool) and self._disjoint.knows_const:
            return {"type": "array", "items": self.negate(value, None, references_left)}
        if keyword in ("const", "enum"):
            return self._negate_values(keyword, value)
        if keyword in _COUNTS:
            return _negate_count(keyword, value)
        if keyword in _BOUNDS and isinstance(value, int | float) and abs(value) < _MAX_EXACT:
            if isinstance(value, bool):  # exclusiveMinimum in draft 4
                raise _Unknown
            return {"type": "number", _BOUNDS[keyword]: value}
        if keyword == "pattern" and isinstance(value, str):
            pattern = negate_pattern(value)
            if pattern is not None:
                return {"type": "string", "pattern": pattern}
        raise _Unknown

    def _copy(self, schema: object) -> Schema | bool:
        if not isinstance(schema, dict | bool):
            raise _Unknown
        stack: list[object] = [schema]
        while stack:
            self._spend(1)
            stack += [member for _, member in list_members(stack.pop()) if isinstance(member, dict | list)]
        return copy.deepcopy(schema)

    def _spend(self, amount: int) -> None:
        self._disjoint.negations_left -= amount
        if self._disjoint.negations_left < 0:
            raise _Unknown

    def _negate_member(self, name: str, schema: object, references_left: int) -> Schema | bool:
        """Require an object to have the property with an invalid value."""
        value = self.negate(schema, None, references_left)
        return value and {"type": "object", "required": [name], "properties": {name: value}}

    def _negate_values(self, keyword: str, value: object) -> Schema | bool:
        if keyword == "const" and not self._disjoint.knows_const:
            raise _Unknown
        values = [value] if keyword == "const" else value
        if not isinstance(values, list):
            raise _Unknown
        numbers = [number for number in values if isinstance(number, int | float) and not isinstance(number, bool)]
        texts = [text for text in values if isinstance(text, str)]
        booleans = [flag for flag in values if isinstance(flag, bool)]
        if len(numbers) + len(texts) + len(booleans) + values.count(None) < len(values):
            raise _Unknown
        named = [
            name
            for name, some in (("number", numbers), ("string", texts), ("boolean", booleans), ("null", None in values))
            if some
        ]
        parts: list[Schema | bool] = [_negate_types(named)] if named else [True]
        if len(set(booleans)) == 1:
            parts.append({"enum": [not booleans[0]]})
        if texts:
            pattern = negate_texts(texts)
            if pattern is None:
                raise _Unknown
            parts.append({"type": "string", "pattern": pattern})
        if numbers:
            parts += _list_gaps(numbers)
        return join("anyOf", parts)


def join(keyword: str, parts: Iterable[Schema | bool]) -> Schema | bool:
    """Return the anyOf or allOf of some parts, simplified."""
    absorbing = keyword == "anyOf"  # true is, in anyOf
    kept = []
    for part in parts:
        if part is absorbing:
            return absorbing
        if not isinstance(part, bool):
            kept.append(part)
    if not kept:
        return not absorbing
    return kept[0] if len(kept) == 1 else {keyword: kept}


def are_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


def _negate_types(value: object) -> Schema | bool:
    """No expression matches numbers that are not integers."""
    named = value if isinstance(value, list) else [value]
    if any(name not in (*TYPES, "integer") for name in named) or ("integer" in named and "number" not in named):
        raise _Unknown
    others = [name for name in TYPES if name not in named]
    return {"type": others} if others else False


def _negate_count(keyword: str, value: object) -> Schema | bool:
    if type(value) is not int or value < 0:
        raise _Unknown
    kind, opposite, step = _COUNTS[keyword]
    if opposite == "minProperties" and value + step > 1:  # one key may occur several times
        raise _Unknown
    return {"type": kind, opposite: value + step} if value + step >= 0 else False


def _negate_closed(schema: Schema, keys: Set[str] | None) -> Schema | bool:
    """Require a key that additionalProperties forbids. The possible keys must be known."""
    named = schema.get("properties", {})
    if schema["additionalProperties"] is True or schema["additionalProperties"] == {}:
        return False
    if schema["additionalProperties"] is not False or "patternProperties" in schema or not isinstance(named, dict):
        raise _Unknown
    if keys is None:
        raise _Unknown
    others = sorted(keys - set(named))
    return join("anyOf", [{"type": "object", "required": [name]} for name in others])


def _list_gaps(values: list[int | float]) -> list[Schema | bool]:
    """List the ranges of numbers between some integers."""
    if any(value % 1 or abs(value) >= _MAX_EXACT for value in values):
        raise _Unknown
    numbers = sorted({int(value) for value in values})
    gaps: list[Schema | bool] = [{"type": "number", "exclusiveMaximum": numbers[0]}]
    for one, other in pairwise(numbers):
        gaps.append({"type": "number", "exclusiveMinimum": one, "exclusiveMaximum": other})
    return [*gaps, {"type": "number", "exclusiveMinimum": numbers[-1]}]
