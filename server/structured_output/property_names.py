"""Rewrite `propertyNames` as `patternProperties`, which llguidance supports."""

from __future__ import annotations

import re
from collections.abc import Callable

from serve_llm.server.structured_output.disjoint import DisjointSchemas
from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.negation import negate
from serve_llm.server.structured_output.pattern import quote_pattern, split_units, translate_pattern
from serve_llm.server.structured_output.schema_walk import KEYWORDS, Schema, add_part
from serve_llm.server.structured_output.string_formats import FORMATS, normalize_format

_MAX_REFERENCES = 8  # maximum length of a chain of references
_LENGTHS = frozenset(("minLength", "maxLength"))
_NEUTRAL = frozenset(("$defs", "definitions"))
_ANY = "(?s:.)"
_CHARACTER = r"(?:\\[dDwWsS]|\\[^\w\s]|\[\^?(?:\\.|[^]\\])+\]|[^\\^$*+?()\[\]{}|])"
_QUANTIFIER = r"(?:[*+?]|\{[0-9]{1,9}(?:,[0-9]{0,9})?\})"
_UNIT = re.compile(f"({_CHARACTER})({_QUANTIFIER}?)", re.DOTALL)
_UNITS = re.compile(rf"\^((?:{_CHARACTER}{_QUANTIFIER}?)+)\$", re.DOTALL)  # only characters
# An expression with the same meaning in Python, for names in one line.
_COMMON = re.compile(
    rf"(?:[a-zA-Z0-9_ /:@.,-]|\\[./-]|\[\^?[a-zA-Z0-9_./-]+\]|[\^$|)]|\((?:\?:)?|(?<![*+?}}]){_QUANTIFIER})*"
)
_LINE_ENDS = re.compile("[\n\r\u2028\u2029]")

# Possible names: one of these texts, or matches of an expression; True: anything, False: nothing.
Names = frozenset[str] | str | bool


class _UnknownNames(Exception):
    """There is no known way to write the names."""


def rewrite_property_names(schema: Schema, disjoint: DisjointSchemas) -> None:
    """What cannot be rewritten stays, to be refused."""
    if "propertyNames" not in schema:
        return
    try:
        allowed = _NameReader(disjoint).read(schema["propertyNames"])
    except _UnknownNames:
        return
    del schema["propertyNames"]
    if isinstance(allowed, frozenset):
        allowed = _write_texts(allowed)
    if allowed is not True:
        patterns: Schema = {"patternProperties": {allowed: True}} if allowed else {}
        add_part(schema, {**patterns, "additionalProperties": False})


class _NameReader:
    """Methods raise _UnknownNames."""

    def __init__(self, disjoint: DisjointSchemas) -> None:
        self._disjoint = disjoint
        self._references_left = _MAX_REFERENCES

    def read(self, schema: object) -> Names:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _UnknownNames
        keywords = {keyword for keyword in schema if keyword in KEYWORDS} - _NEUTRAL
        if "$ref" in keywords:
            targets = list(self._disjoint.resolve(schema))
            self._references_left -= 1
            if len(targets) != 1 or len(keywords) > 1 or self._references_left < 0:
                raise _UnknownNames
            return self.read(targets[0])
        found: Names = True
        for keyword in sorted(keywords - _LENGTHS):
            found = _intersect(found, self._read_keyword(keyword, schema[keyword]))
        if _LENGTHS.isdisjoint(keywords):
            return found
        return _limit_lengths(found, schema.get("minLength", 0), schema.get("maxLength"))

    def _read_keyword(self, keyword: str, value: object) -> Names:
        if keyword == "type" and isinstance(value, str | list):
            return value == "string" or (isinstance(value, list) and "string" in value)
        if keyword == "pattern" and isinstance(value, str):
            return value
        if keyword == "format" and isinstance(value, str):
            known = normalize_format(value)
            if known is None:
                return True
            if known in FORMATS:
                return f"^(?:{FORMATS[known]})$"
        if keyword in ("const", "enum"):
            values = [value] if keyword == "const" else value
            if isinstance(values, list):
                return frozenset(text for text in values if isinstance(text, str))
        if keyword == "not" and (negated := negate(value, self._disjoint)) is not None:
            return self.read(negated)
        if keyword in ("allOf", "anyOf", "oneOf") and isinstance(value, list):
            return _JOIN[keyword]([self.read(part) for part in value])
        raise _UnknownNames


def _intersect_all(parts: list[Names]) -> Names:
    found: Names = True
    for part in parts:
        found = _intersect(found, part)
    return found


def _intersect(one: Names, other: Names) -> Names:
    if isinstance(one, bool) or one == other:
        return other if one else False
    if isinstance(other, bool):
        return one if other else False
    if isinstance(one, frozenset) and isinstance(other, frozenset):
        return one & other
    if isinstance(one, frozenset) and isinstance(other, str):
        return _match(one, other)
    if isinstance(one, str) and isinstance(other, frozenset):
        return _match(other, one)
    raise _UnknownNames


def _match(texts: frozenset[str], pattern: str) -> frozenset[str]:
    """Return the texts that an expression matches."""
    if not _COMMON.fullmatch(pattern) or any(map(_LINE_ENDS.search, texts)):
        raise _UnknownNames
    try:
        return frozenset(text for text in texts if re.search(pattern, text))
    except (re.error, OverflowError):
        raise _UnknownNames from None


def _unite(parts: list[Names]) -> Names:
    if True in parts:
        return True
    texts = frozenset[str]().union(*(part for part in parts if isinstance(part, frozenset)))
    patterns = [part for part in parts if isinstance(part, str)]
    if not patterns:
        return texts or False
    if len(patterns) == 1 and not texts:
        return patterns[0]
    return f"^(?:{'|'.join([*map(quote_pattern, sorted(texts)), *map(_write_whole, patterns)])})$"


def _unite_exclusive(parts: list[Names]) -> Names:
    """Return names that exactly one part allows: those of any part, if no name is in two of them."""
    for index, part in enumerate(parts):
        for other in parts[:index]:
            if _intersect(part, other):
                raise _UnknownNames
    return _unite(parts)


_JOIN: dict[str, Callable[[list[Names]], Names]] = {
    "allOf": _intersect_all,
    "anyOf": _unite,
    "oneOf": _unite_exclusive,
}


def _write_whole(pattern: str) -> str:
    """Return the expression that matches whole texts in which `pattern` is found."""
    try:
        units = split_units(translate_pattern(pattern))
    except GrammarError:
        raise _UnknownNames from None
    depth = 0
    for unit in units:
        depth += (unit == "(") - (unit == ")")
        if unit == "|" and not depth:
            raise _UnknownNames
    begins = units[:1] == ["^"]
    ends = units[-1:] == ["$"]
    inner = "".join(units[begins : len(units) - ends])
    return f"{'' if begins else f'{_ANY}*'}(?:{inner}){'' if ends else f'{_ANY}*'}"


def _write_texts(texts: frozenset[str]) -> str | bool:
    return f"^(?:{'|'.join(map(quote_pattern, sorted(texts)))})$" if texts else False


def _limit_lengths(names: Names, least: object, most: object) -> Names:
    if type(least) is not int or least < 0 or (most is not None and (type(most) is not int or most < 0)):
        raise _UnknownNames
    assert most is None or isinstance(most, int)
    if names is False or (most is not None and most < least):
        return False
    if names is True:
        return f"^{_ANY}{_write_count(least, most)}$"
    if isinstance(names, frozenset):
        return frozenset(text for text in names if least <= len(text) and (most is None or len(text) <= most))
    assert isinstance(names, str)
    return _limit_pattern(names, least, most)


def _limit_pattern(pattern: str, least: int, most: int | None) -> str | bool:
    """Return an expression of characters of which at most one is repeated, with lengths limited to the range."""
    found = _UNITS.fullmatch(pattern)
    units = _UNIT.findall(found[1]) if found else []
    repeated = [index for index, (_, quantifier) in enumerate(units) if quantifier]
    if not units or len(repeated) > 1:
        raise _UnknownNames
    if not repeated:
        return pattern if least <= len(units) and (most is None or len(units) <= most) else False
    num_others = len(units) - 1
    character, quantifier = units[repeated[0]]
    own_least, own_most = _read_count(quantifier)
    least = max(own_least, least - num_others)
    mosts = [count for count in (own_most, None if most is None else most - num_others) if count is not None]
    if mosts and min(mosts) < least:
        return False
    units[repeated[0]] = (character, _write_count(least, min(mosts, default=None)))
    return f"^{''.join(map(''.join, units))}$"


def _read_count(quantifier: str) -> tuple[int, int | None]:
    if quantifier in ("*", "+", "?"):
        return int(quantifier == "+"), 1 if quantifier == "?" else None
    least, comma, most = quantifier[1:-1].partition(",")
    return int(least), int(most) if most else None if comma else int(least)


def _write_count(least: int, most: int | None) -> str:
    return f"{{{least},{'' if most is None else most}}}"
