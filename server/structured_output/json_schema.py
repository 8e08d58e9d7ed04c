"""JSON schemas for llguidance: refuse keywords that it would ignore, and find the keyword behind an error."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

from llguidance import LLMatcher

from serve_llm.server.structured_output.disjoint import DisjointSchemas
from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.float_texts import count_places, is_read_exactly, to_decimal
from serve_llm.server.structured_output.number_rewrites import BOUNDS, MAX_DECIMAL_PLACES, NumberRewriter
from serve_llm.server.structured_output.pattern import narrow_whitespace
from serve_llm.server.structured_output.schema_rewrites import rewrite_keywords
from serve_llm.server.structured_output.schema_walk import (
    IGNORED_BY_COMPILER,
    KEYWORDS,
    Schema,
    Subschema,
    find_targets,
    list_members,
    list_subschemas,
    walk,
)
from serve_llm.server.structured_output.size_errors import blame_largest

# One space, or one line break and an indentation: a model must not write whitespace forever.
WHITESPACE = r"(\x20|\r?\n[\x20\x09]{0,40})"

# Without \u: otherwise a named property could be written in a second way, which llguidance takes for an additional one.
_ESCAPES = 'nrbtf\\"'

# llguidance computes with bounds as 64-bit floats, and writes 64-bit integers.
_MAX_FLOAT_INTEGER = 2**53
_MAX_INTEGER = 2**63 - 1

_OWN_WHITESPACE = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")  # in x-guidance

MAX_DEPTH = 100  # maximum nesting of schemas
LOCATE_SECONDS = 0.3  # time for finding the place of an error

# The keywords behind an error of llguidance; the groups of a match are keywords too.
_KEYWORDS_IN_ERRORS = (
    (re.compile(r'Unimplemented keys: \["([^"]+)"'), ()),
    (re.compile("Unknown format"), ("format",)),
    (re.compile("(oneOf) constraints"), ()),
    (re.compile("min/maxProperties"), ("maxProperties", "minProperties")),
    (re.compile("patternProperty"), ("patternProperties",)),
    (re.compile("regex|lookaround"), ("pattern", "patternProperties")),
    (re.compile("circular references|Resource |Pointer "), ("$ref",)),
    (re.compile("minimum.*maximum"), ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")),
    (re.compile("minLength.*maxLength"), ("minLength", "maxLength")),
    (re.compile("minItems.*maxItems"), ("minItems", "maxItems")),
    (re.compile("required property"), ("required",)),
)
_PROCESSING = re.compile(r"; while processing [^#]*#?(.*)$")  # the $ref that led to an error

# A part of a schema keeps its meaning next to these.
_CONTEXT = ("$schema", "$id", "id", "$defs", "definitions")

Find = Callable[[object], str]
TryPart = Callable[[object], str | None]  # the error of a schema, empty if there is none; None if no time is left


def parse_schema(text: str) -> object:
    """Raises GrammarError."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is malformed JSON: {error}") from None


def write_grammar(schema: object, *, whitespace: str | None, closed: bool) -> str:
    """Write the grammar of texts that are valid under a schema. The compiler has not checked it yet.

    whitespace: a regex for the whitespace between tokens; None for none. closed: objects whose schema has `properties`
    and no `additionalProperties` have no others. Raises GrammarError.
    """
    prepared = prepare_schema(schema, closed=closed)
    own = prepared.get("x-guidance")
    for name in _OWN_WHITESPACE:
        if whitespace != WHITESPACE and isinstance(own, dict) and name in own:
            raise GrammarError(f"{name} excludes disable_any_whitespace and whitespace_pattern", keyword="x-guidance")
    if isinstance(own, dict):
        narrowed = {name: narrow_whitespace(own[name]) for name in _OWN_WHITESPACE if isinstance(own.get(name), str)}
        prepared = {**prepared, "x-guidance": {**own, **narrowed}}
    options: dict[str, object] = {"whitespace_flexible": False}
    if whitespace is not None:
        options = {"whitespace_flexible": True, "whitespace_pattern": whitespace}
    try:
        text = json.dumps(prepared, ensure_ascii=False, allow_nan=False)
        text.encode()
        return LLMatcher.grammar_from_json_schema(text, defaults=options, overrides={"lenient": False})  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None


def prepare_schema(schema: object, *, closed: bool) -> Schema:
    """Return a schema that llguidance enforces exactly. `closed`: as for `write_grammar`. Raises GrammarError."""
    if schema is True:
        schema = {}
    if schema is False:
        raise GrammarError("no value is valid under the schema false")
    if not isinstance(schema, dict):
        raise GrammarError("it must be an object or a boolean")
    check_depth(schema)
    for child in walk(schema):
        if isinstance(child.schema, dict):
            _check_keywords(child.schema, child.pointer)
    schema = _rewrite(_close(schema) if closed else schema)
    if not any(_names_keys_and_allows_others(child.schema) for child in walk(schema)):
        return schema
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise GrammarError("it must be an object", keyword="x-guidance")
    if "u" in str(options.get("json_allowed_escapes", "")):
        raise GrammarError("json_allowed_escapes must not hold u beside open objects", keyword="x-guidance")
    return {**schema, "x-guidance": {"json_allowed_escapes": _ESCAPES, **options}}


def _rewrite(schema: Schema) -> Schema:
    """Return a copy that uses keywords supported by llguidance."""
    copy: Schema = json.loads(json.dumps(schema))
    disjoint = DisjointSchemas(schema)
    references = [child.schema.get("$ref") for child in walk(schema) if isinstance(child.schema, dict)]
    pointed = {name for reference in references for name in str(reference).split("/")}
    for child in walk(copy):
        if isinstance(child.schema, dict):
            with _placing_errors(child):
                rewrite_keywords(child.schema, disjoint, pointed, schema.get("$schema"))
    children = list(walk(copy))
    numbers = NumberRewriter(children)
    for child in children:
        if isinstance(child.schema, dict):
            with _placing_errors(child):
                numbers.rewrite(child.schema)
    return copy


@contextmanager
def _placing_errors(child: Subschema) -> Iterator[None]:
    try:
        yield
    except GrammarError as error:
        raise GrammarError(error.message, child.pointer, error.keyword) from None


def _names_keys_and_allows_others(schema: object) -> bool:
    if not isinstance(schema, dict) or schema.get("additionalProperties") is False:
        return False
    return "properties" in schema or "patternProperties" in schema


def _check_keywords(schema: Schema, pointer: str) -> None:
    """Refuse keywords that llguidance ignores."""
    for keyword in IGNORED_BY_COMPILER:
        if keyword in schema:
            raise GrammarError(f"{keyword} is not supported", pointer, keyword)
    divisor = schema.get("multipleOf")
    if isinstance(divisor, int | float) and divisor <= 0:
        raise GrammarError("must be greater than 0", pointer, "multipleOf")
    _check_min_properties(schema, pointer)
    if divisor == math.inf:
        raise GrammarError("the number is beyond the range of 64-bit floats", pointer, "multipleOf")
    for keyword in ("const", "enum"):
        _check_numbers(schema.get(keyword), pointer, keyword)
    for keyword in BOUNDS:
        _check_bound(schema, pointer, keyword)


def _check_min_properties(schema: Schema, pointer: str) -> None:
    """Refuse a number that a text could reach by repeating one key."""
    least = schema.get("minProperties")
    required = schema.get("required", [])
    if isinstance(least, int | float) and isinstance(required, list) and least > len(set(map(str, required))) + 1:
        raise GrammarError(
            "more than one key that `required` does not name cannot be enforced", pointer, "minProperties"
        )


def _check_numbers(value: object, pointer: str, keyword: str) -> None:
    """Refuse numbers that llguidance would round, and those that no float can represent."""
    if isinstance(value, float) and math.isinf(value):
        raise GrammarError("the number is beyond the range of 64-bit floats", pointer, keyword)
    if type(value) is int and (abs(value) > _MAX_INTEGER or int(float(value)) != value):
        raise GrammarError(f"the integer {str(value)[:40]} cannot be enforced without rounding", pointer, keyword)
    if isinstance(value, float) and not is_read_exactly(value):
        raise GrammarError(f"the number {value} cannot be enforced without rounding", pointer, keyword)
    for _, member in list_members(value):
        _check_numbers(member, pointer, keyword)


def _check_bound(schema: Schema, pointer: str, keyword: str) -> None:
    """Refuse bounds that llguidance would round, or cannot write. It writes no integer above 2**63 - 1."""
    bound = schema.get(keyword)
    if type(bound) not in (int, float):
        return
    assert isinstance(bound, int | float)
    is_inclusive = keyword in ("minimum", "maximum")
    if abs(bound) < _MAX_FLOAT_INTEGER + is_inclusive:
        _check_numbers(bound, pointer, keyword)
        if isinstance(bound, float) and count_places(Fraction(to_decimal(bound))) > MAX_DECIMAL_PLACES:
            message = f"bounds with more than {MAX_DECIMAL_PLACES} decimal places cannot be enforced"
            raise GrammarError(message, pointer, keyword)
        return
    types = schema.get("type")
    is_integer = "number" not in types if isinstance(types, list) else types == "integer"
    if is_integer and keyword == "maximum" and bound >= _MAX_INTEGER:
        return
    raise GrammarError(f"bounds beyond 2**53 ({_MAX_FLOAT_INTEGER}) would be rounded", pointer, keyword)


def locate_error(schema: object, message: str, find_error: Find) -> GrammarError:
    """Find the subschema and the keyword that llguidance refuses with `message`.

    find_error: returns llguidance's message for a schema, empty if it accepts it.
    """
    deadline = time.monotonic() + LOCATE_SECONDS
    message, hint = _split_message(message)
    if not isinstance(schema, dict):
        return GrammarError(message)
    context = {name: schema[name] for name in _CONTEXT if name in schema}

    def try_part(part: object) -> str | None:
        if time.monotonic() > deadline or not isinstance(part, dict):
            return None
        found, _ = _split_message(find_error({**context, **part}))
        return found

    keywords = _find_keywords(message)
    users = [(child, name) for child in walk(schema) for name in keywords if _has(child, name)]
    users.sort(key=lambda user: not user[0].pointer.startswith(hint))  # starting with those at the hint
    for child, name in users:
        if len(users) == 1 or try_part(child.schema) == message:
            return GrammarError(message, child.pointer, name)
    place = _descend(schema, message, try_part)
    if not users:
        return GrammarError(message, place.pointer, _choose_keyword(place.schema, message, try_part))
    child, name = next((user for user in users if user[0].pointer.startswith(place.pointer)), users[0])
    return GrammarError(message, child.pointer, name)


def _split_message(message: str) -> tuple[str, str]:
    """Split an error into the text without the reference that led to it, and the JSON pointer in that reference."""
    found = _PROCESSING.search(message)
    return (message[: found.start()], found[1]) if found else (message, "")


def _find_keywords(message: str) -> list[str]:
    """Return the keywords that may have caused an error."""
    for pattern, keywords in _KEYWORDS_IN_ERRORS:
        if found := pattern.search(message):
            return [*found.groups(), *keywords]
    return []


def _has(child: Subschema, keyword: str) -> bool:
    return isinstance(child.schema, dict) and keyword in child.schema


def _descend(schema: Schema, message: str, try_part: TryPart) -> Subschema:
    """Return the deepest subschema that is refused by itself."""
    place = Subschema("", schema)
    seen = {""}
    while True:
        children = [child for child in list_subschemas(place) if child.pointer not in seen]
        children += [child for child in find_targets(Subschema("", schema), place) if child.pointer not in seen]
        deeper = next((child for child in children if try_part(child.schema) == message), None)
        if deeper is None:
            return place
        seen.add(deeper.pointer)
        place = deeper


def _choose_keyword(schema: object, message: str, try_part: TryPart) -> str | None:
    """Return the keyword without which a schema is not refused; otherwise the longest one, because a limit on size was
    exceeded or no time is left."""
    assert isinstance(schema, dict)
    keywords: list[str] = [keyword for keyword in schema if keyword in KEYWORDS]
    for keyword in keywords:
        if try_part({name: value for name, value in schema.items() if name != keyword}) not in (message, None):
            return keyword
    own = [keyword for keyword in keywords if keyword not in _CONTEXT] or keywords
    return max(own, key=lambda keyword: len(json.dumps(schema[keyword])), default=None)


def refuse_constant(name: str) -> object:
    """Refuse a constant in json.loads, which otherwise accepts NaN and Infinity. Raises ValueError."""
    raise ValueError(f"{name} is not JSON")


def check_depth(schema: Schema) -> None:
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH):
        children: list[object] = []
        for node in level:
            if isinstance(node, dict):
                children += node.values()
            elif isinstance(node, list):
                children += node
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise blame_largest(schema, f"it holds more than {MAX_DEPTH} objects and lists inside each other")


def _close(schema: Schema) -> Schema:
    """Return a copy in which objects have only named properties."""
    copy: Schema = json.loads(json.dumps(schema))
    for child in walk(copy):
        if isinstance(child.schema, dict) and ("properties" in child.schema or "patternProperties" in child.schema):
            child.schema.setdefault("additionalProperties", False)
    return copy
