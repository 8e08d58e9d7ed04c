"""Values that may occur in place of a string without quotes: which of them must share a terminal with the string.

llguidance's lexer stays in a terminal as long as it can. A text may begin like `null` or 12 and continue as a string,
so these values are alternatives of the string inside its own terminal. All other values are JSON after the same
opening, and no string begins like them. Text that the parser would read as a value is not a string.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from serve_llm.server.dialects.lark import write_literal, write_regex
from serve_llm.server.dialects.schema_members import BESIDE, GENERAL, Schema
from serve_llm.server.dialects.schema_types import ALL_TYPES, find_type, find_types
from serve_llm.server.dialects.tagged_codec import NUMBER
from serve_llm.server.structured_output.schema_walk import KEYWORDS

_SPACE = r"[\s\x1c-\x1f]*"  # what Python strips
_EXPONENT = "[eE][-+]?[0-9]"
_INTEGER = "-?(0|[1-9][0-9]{0,300})"
_WRITTEN = {  # values of a type under a schema without further restrictions
    "null": "(?i:null|none)",
    "boolean": "(?i:true|false)",
    "integer": _INTEGER,
    "number": rf"{_INTEGER}(\.[0-9]{{1,300}})?({_EXPONENT}{{1,3}})?",
}
_READ = {  # texts that the parser reads as values of a type
    "null": "(?i:null|none)",
    "boolean": "(?i:true|false)",
    "integer": rf"[-+]?(0[xXoObB][0-9a-fA-F_]+|[0-9][0-9_]*(\.[0_]*)?|\.[0_]+|[0-9_.]*{_EXPONENT}[0-9_]*)",
    "number": NUMBER,
}
_FIRST = {  # characters with which the JSON of a type begins
    "null": "[nN]",
    "boolean": "[tTfF]",
    "integer": "[-+.0-9]",
    "number": "[-+.0-9]",
    "object": r"\{",
    "array": r"\[",
    "string": '"',
}
_OF_NUMBERS = GENERAL | {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "format"}
_LIMITS = {"null": GENERAL, "boolean": GENERAL, "integer": _OF_NUMBERS, "number": _OF_NUMBERS}


class InlineValues(NamedTuple):
    expressions: Sequence[str]  # values in the terminal of the strings
    rest: Sequence[Schema]  # values that are JSON after the same opening
    excluded: Sequence[str]  # texts that are not strings


def split_values(
    others: Sequence[Schema], strings: Sequence[Schema], types: Collection[str], root: Schema
) -> InlineValues:
    """others, strings: of a `SplitSchema`. types: those that the parser gives the argument."""
    parts = [(part, _write_inline(part)) for schema in others for part in list_parts(schema, root)]
    num_inline = -1
    while num_inline != sum(bool(expression) for _, expression in parts):
        # A number in the terminal would keep the lexer there even if it is the beginning of a JSON number.
        num_inline = sum(bool(expression) for _, expression in parts)
        firsts = {first for part, expression in parts if not expression for first in _list_firsts(part, root)}
        parts = [(part, "" if firsts & _list_firsts(part, root) else expression) for part, expression in parts]
    firsts = {first for part, expression in parts if not expression for first in _list_firsts(part, root)}
    excluded = [f"{_SPACE}{first}(?s:.*)" for first in sorted(firsts)]
    excluded += [f"{_SPACE}({_READ[name]}){_SPACE}" for name in ALL_TYPES if name in types and name in _READ]
    if set(types) != {"string"} and not all(KEYWORDS.isdisjoint(schema.keys() - {"type"}) for schema in strings):
        excluded.append(f'{_SPACE}"(?s:.*)"{_SPACE}')  # the parser reads a quoted string without its quotes
    rest = [part for part, expression in parts if not expression]
    if len(rest) == len(parts):
        rest = list(others)
    elif len(rest) > 1:
        rest = [{"anyOf": rest}]
    return InlineValues(
        list(dict.fromkeys(expression for _, expression in parts if expression)),
        rest,
        [write_regex(pattern).expression for pattern in excluded],
    )


def list_alternatives(schema: Schema, root: Schema) -> list[object]:
    """Return the branches of an anyOf, or of a oneOf whose branches exclude each other; none if there are other
    keywords."""
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and KEYWORDS.isdisjoint(schema.keys() - {keyword} - BESIDE):
            firsts = [first for branch in branches for first in _list_firsts(branch, root)]
            if keyword == "anyOf" or len(firsts) == len(set(firsts)):
                return branches
    return []


def list_parts(schema: Schema, root: Schema) -> Iterator[Schema]:
    """Yield the schema as alternatives of one type or value each, if it can be written that way."""
    if branches := list_alternatives(schema, root):
        for branch in branches:
            yield from list_parts(branch, root) if isinstance(branch, Mapping) else ()
        return
    types = set(find_types(schema, root))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and KEYWORDS.isdisjoint(schema.keys() - {"type", "enum", "const"}):
        if "const" not in schema or "enum" not in schema:
            allowed = types | ({"integer"} if "number" in types else set())
            yield from ({"const": value} for value in values if find_type(value) in allowed)
            return
    if isinstance(schema.get("type"), list) and GENERAL.isdisjoint(schema):
        yield from ({**schema, "type": name} for name in sorted(types))
        return
    yield schema


def _write_inline(part: Schema) -> str:
    """Return the expression of a part's values; "" if they must be written as JSON."""
    if part.keys() == {"const"}:
        match value := part["const"]:
            case None:
                return write_regex(_WRITTEN["null"]).expression
            case bool():
                return write_regex(f"(?i:{json.dumps(value)})").expression
            case int() | float():
                return write_literal(json.dumps(value)).expression
            case _:
                return ""
    kind = str(part.get("type"))
    if kind not in _LIMITS or not _LIMITS[kind].isdisjoint(part):
        return ""
    return write_regex(_WRITTEN[kind]).expression


def _list_firsts(schema: object, root: Schema) -> set[str]:
    """Return how the values of a schema can begin, as expressions."""
    return {_FIRST[name] for name in set(find_types(schema, root)) or set(_FIRST) if name in _FIRST}
