"""Schemas in formats that write strings without quotes: which part of a schema is a string, and its valid texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from serve_llm.server.dialects.delimiters import DelimiterSet
from serve_llm.server.dialects.dialect import Delimiter, get_written_form
from serve_llm.server.dialects.lark import ANY_TEXT, Symbol, write_free_text, write_literal, write_patterns, write_regex
from serve_llm.server.dialects.schema_members import BESIDE, CANNOT, GENERAL, NOT_BESIDE, Schema, resolve_alone
from serve_llm.server.dialects.schema_types import ALL_TYPES, find_type, find_types
from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.pattern import split_units, translate_pattern
from serve_llm.server.structured_output.schema_walk import KEYWORDS
from serve_llm.server.structured_output.string_formats import FORMATS, normalize_format

_ALTERNATIVES = ("anyOf", "oneOf")
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_MAX_LENGTH = 10_000
_FLAGS = re.compile(r"\(\?[a-zA-Z-]+\)")


class SplitSchema(NamedTuple):
    strings: Sequence[Schema]  # schemas of valid strings
    others: Sequence[Schema]  # schemas of the values of other types


def split_schema(schema: object, root: Schema) -> SplitSchema:
    """root: the schema that references point into. Raises GrammarError."""
    schema = resolve_alone(schema, root)
    if schema is True or schema == {}:
        return SplitSchema([{}], [])
    if not isinstance(schema, Mapping):
        raise GrammarError(CANNOT, keyword="properties")
    for keyword in _ALTERNATIVES:
        if keyword in schema:
            return _split_alternatives(schema, keyword, root)
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) == 1 and KEYWORDS.isdisjoint(schema.keys() - {"allOf"} - BESIDE):
        return split_schema(parts[0], root)
    types = set(find_types(schema, root)) or {"string"}
    if "string" not in types:
        return SplitSchema([], [schema])
    if "enum" in schema or "const" in schema:
        return _split_values(schema, types)
    others = [name for name in ALL_TYPES if name in types and name != "string"]
    without_type = {key: value for key, value in schema.items() if key != "type"}
    return SplitSchema([{**without_type, "type": "string"}], [{**without_type, "type": others}] if others else [])


def _split_values(schema: Schema, types: set[str]) -> SplitSchema:
    keyword, values = _read_values(schema)
    if "const" in schema:
        const = find_type(schema["const"]), schema["const"]
        values = [value for value in values if (find_type(value), value) == const]
    allowed = types | ({"integer"} if "number" in types else set())
    values = [value for value in values if find_type(value) in allowed]
    if not values:
        raise GrammarError("no value is valid", keyword=keyword)
    texts = [value for value in values if isinstance(value, str)]
    others = [value for value in values if not isinstance(value, str)]
    if texts and any(name in schema for name in (*_OF_STRINGS, *GENERAL - {"enum", "const"})):
        raise GrammarError(NOT_BESIDE, keyword=keyword)
    rest = {name: value for name, value in schema.items() if name not in ("type", "const", "enum")}
    strings: list[Schema] = []
    if texts:
        strings.append({"enum": texts} if keyword == "enum" else {"const": texts[0]})
    return SplitSchema(strings, [{**rest, "enum": others}] if others else [])


def _read_values(schema: Schema) -> tuple[str, list[object]]:
    """Return the keyword, enum or const, and its values."""
    if "enum" not in schema:
        return "const", [schema["const"]]
    values = schema["enum"]
    if not isinstance(values, list):
        raise GrammarError("it must be a list", keyword="enum")
    return "enum", values


def write_strings(found: SplitSchema, end: Delimiter, excluded: Sequence[str] = ()) -> Symbol:
    """Write a terminal for the strings of a schema, without quotes. end: follows a string, and cannot occur in it.

    excluded: expressions of texts that are not strings. Raises GrammarError.
    """
    expression = f"({' | '.join(write_string(schema, end).expression for schema in found.strings)})"
    if excluded:
        expression = f"({expression} & ~({' | '.join(excluded)}))"
    return Symbol(expression, is_terminal=True)


def _split_alternatives(schema: Schema, keyword: str, root: Schema) -> SplitSchema:
    branches = schema[keyword]
    if not isinstance(branches, list) or not KEYWORDS.isdisjoint(schema.keys() - {keyword} - BESIDE):
        raise GrammarError(NOT_BESIDE, keyword=keyword)
    strings: list[Schema] = []
    others: list[Schema] = []
    for branch in branches:
        found = split_schema(branch, root)
        if keyword == "oneOf" and strings and found.strings:
            raise GrammarError("several kinds of strings cannot be enforced in this model's format", keyword=keyword)
        strings += found.strings
        others += found.others
    if len(others) > 1:
        others = [{keyword: others}]
    return SplitSchema(strings, others)


def write_string(schema: Schema, end: Delimiter) -> Symbol:
    """Write a terminal for strings of one schema of a `SplitSchema`. end: as for `write_strings`. Raises
    GrammarError."""
    if "enum" in schema or "const" in schema:
        keyword, values = _read_values(schema)
        for value in values:
            _check_value(str(value), end, keyword)
        return Symbol(f"({' | '.join(write_literal(str(value)).expression for value in values)})", is_terminal=True)
    for keyword in schema:
        if keyword in GENERAL:
            raise GrammarError("it cannot be enforced for strings in this model's format", keyword=keyword)
    expressions = [write_free_text(write_patterns(end)).expression]
    expressions += _write_length(schema)
    if isinstance(schema.get("pattern"), str):
        expressions.append(_write_pattern(str(schema["pattern"])))
    name = normalize_format(schema.get("format"))
    if name is not None:
        if name not in FORMATS:
            raise GrammarError(f"{name} cannot be enforced in this model's format", keyword="format")
        expressions.append(write_regex(FORMATS[name]).expression)
    return Symbol(f"({' & '.join(expressions)})" if len(expressions) > 1 else expressions[0], is_terminal=True)


def _write_length(schema: Schema) -> list[str]:
    """Write texts of the allowed lengths; nothing if all are allowed."""
    least = schema.get("minLength", 0)
    most = schema.get("maxLength")
    for keyword, value in (("minLength", least), ("maxLength", most)):
        if value is not None and (not isinstance(value, int) or not 0 <= value <= _MAX_LENGTH):
            raise GrammarError(f"it must be 0 to {_MAX_LENGTH} in this model's format", keyword=keyword)
    assert isinstance(least, int) and isinstance(most, int | None)
    if most is not None and least > most:
        raise GrammarError("minLength is greater than maxLength", keyword="minLength")
    if not least and most is None:
        return []
    return [f"/(?s:.{{{least},{'' if most is None else most}}})/"]


def _check_value(value: str, end: Delimiter, keyword: str) -> None:
    """Whether the parser reads a string up to its end."""
    written = value + get_written_form(end)
    found = DelimiterSet([("end", end)]).find(written, 0, final=True)
    if isinstance(found, int) or written[: found.start].rstrip() != value.rstrip():
        raise GrammarError(f"the string {value!r} cannot be written in this model's format", keyword=keyword)


def _write_pattern(pattern: str) -> str:
    """Write texts in which a pattern is found."""
    try:
        pattern = translate_pattern(pattern)
    except GrammarError as error:
        raise GrammarError(error.message, keyword="pattern") from None
    flags = _FLAGS.match(pattern)
    prefix = flags[0] if flags else ""
    branches: list[list[str]] = [[]]
    depth = 0
    for unit in split_units(pattern.removeprefix(prefix)):
        depth += (unit == "(") - (unit == ")")
        if unit == "|" and not depth:
            branches.append([])
        else:
            branches[-1].append(unit)
    if len(branches) > 1 and _FLAGS.search(pattern, len(prefix)):
        raise GrammarError("it cannot be enforced in this model's format", keyword="pattern")
    return f"({' | '.join(_write_branch(prefix, units) for units in branches)})"


def _write_branch(prefix: str, units: list[str]) -> str:
    """Write texts in which one of a pattern's alternatives is found. prefix: flags of the pattern."""
    is_begun = units[:1] == ["^"]
    is_ended = units[-1:] == ["$"]
    inner = units[is_begun : len(units) - is_ended]
    if "^" in inner or "$" in inner:
        raise GrammarError("it cannot be enforced in this model's format", keyword="pattern")
    before = "" if is_begun else f"{ANY_TEXT} "
    after = "" if is_ended else f" {ANY_TEXT}"
    return before + write_regex(f"{prefix}({''.join(inner)})").expression + after
