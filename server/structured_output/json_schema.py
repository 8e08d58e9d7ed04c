"""JSON schemas for llguidance: refuse keywords that it would ignore, and find the keyword that an error is about."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from llguidance import LLMatcher

from serve_llm.server.structured_output.errors import GrammarError

# One space, or one line break and an indentation: a model cannot write whitespace for ever.
WHITESPACE = r"(\x20|\r?\n[\x20\x09]{0,40})"

MAX_DEPTH = 100  # schemas inside each other
LOCATE_SECONDS = 0.3  # for finding the place of an error

# Which keywords an error of llguidance is about; the groups of a match are keywords too.
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

# A part of a schema keeps its meaning beside these.
_CONTEXT = ("$schema", "$id", "id", "$defs", "definitions")

_SCHEMA = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames")
_SCHEMA_TOO = ("then", "unevaluatedItems", "unevaluatedProperties")
_SCHEMA_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_SCHEMA_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_IGNORED_BY_COMPILER = ("disallow", "divisibleBy", "extends")  # keywords from draft 3

KEYWORDS = {*_SCHEMA, *_SCHEMA_TOO, *_SCHEMA_MAPS, *_SCHEMA_LISTS, *_IGNORED_BY_COMPILER}
KEYWORDS |= {"$dynamicRef", "$recursiveRef", "$ref", "const", "contentEncoding", "dependencies", "dependentRequired"}
KEYWORDS |= {"enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxContains", "maxItems", "maxLength"}
KEYWORDS |= {"maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum"}
KEYWORDS |= {"multipleOf", "pattern", "required", "type", "uniqueItems", "x-guidance"}

Find = Callable[[object], str]
TryPart = Callable[[object], str | None]  # the error of a schema, empty without one; None if no time is left
Schema = dict[str, object]


class _Child(NamedTuple):
    pointer: str
    schema: object


def parse_schema(text: str) -> object:
    """Raises GrammarError."""
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"it is malformed JSON: {error}") from None


def write_grammar(schema: object, *, whitespace: str | None, closed: bool) -> str:
    """The grammar of texts that are valid under a schema. The compiler has not seen it yet.

    whitespace: a regex for the whitespace between tokens; None for none. closed: objects whose schema has `properties`
    and no `additionalProperties` have no others. Raises GrammarError.
    """
    if schema is True:
        schema = {}
    if schema is False:
        raise GrammarError("no value is valid under the schema false")
    if not isinstance(schema, dict):
        raise GrammarError("it must be an object or a boolean")
    check_depth(schema)
    for child in _walk(schema):
        if isinstance(child.schema, dict):
            _check_keywords(child.schema, child.pointer)
    if closed:
        schema = _close(schema)
    assert isinstance(schema, dict)
    options: dict[str, object] = {"whitespace_flexible": False}
    if whitespace is not None:
        options = {"whitespace_flexible": True, "whitespace_pattern": whitespace}
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
        return LLMatcher.grammar_from_json_schema(text, defaults=options, overrides={"lenient": False})  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None


def _check_keywords(schema: Schema, pointer: str) -> None:
    """Refuse what llguidance ignores."""
    for keyword in _IGNORED_BY_COMPILER:
        if keyword in schema:
            raise GrammarError(f"{keyword} is not supported", pointer, keyword)
    divisor = schema.get("multipleOf")
    if isinstance(divisor, int | float) and divisor <= 0:
        raise GrammarError("must be greater than 0", pointer, "multipleOf")


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
    users = [(child, name) for child in _walk(schema) for name in keywords if _has(child, name)]
    users.sort(key=lambda user: not user[0].pointer.startswith(hint))  # those at the hint first
    for child, name in users:
        if len(users) == 1 or try_part(child.schema) == message:
            return GrammarError(message, child.pointer, name)
    place = _descend(schema, message, try_part)
    if not users:
        return GrammarError(message, place.pointer, _choose_keyword(place.schema, message, try_part))
    child, name = next((user for user in users if user[0].pointer.startswith(place.pointer)), users[0])
    return GrammarError(message, child.pointer, name)


def _split_message(message: str) -> tuple[str, str]:
    """An error without the reference that led to it, and the JSON pointer in that reference."""
    found = _PROCESSING.search(message)
    return (message[: found.start()], found[1]) if found else (message, "")


def _find_keywords(message: str) -> list[str]:
    """The keywords that an error may be about."""
    for pattern, keywords in _KEYWORDS_IN_ERRORS:
        if found := pattern.search(message):
            return [*found.groups(), *keywords]
    return []


def _has(child: _Child, keyword: str) -> bool:
    return isinstance(child.schema, dict) and keyword in child.schema


def _descend(schema: Schema, message: str, try_part: TryPart) -> _Child:
    """The deepest subschema that is refused alone."""
    place = _Child("", schema)
    seen = {""}
    while True:
        children = [child for child in _children(place) if child.pointer not in seen]
        children += [child for child in _target(schema, place) if child.pointer not in seen]
        deeper = next((child for child in children if try_part(child.schema) == message), None)
        if deeper is None:
            return place
        seen.add(deeper.pointer)
        place = deeper


def _choose_keyword(schema: object, message: str, try_part: TryPart) -> str | None:
    """The keyword without which a schema is not refused; otherwise the longest one, as a limit on size was exceeded."""
    assert isinstance(schema, dict)
    keywords: list[str] = [keyword for keyword in schema if keyword in KEYWORDS]
    for keyword in keywords:
        if try_part({name: value for name, value in schema.items() if name != keyword}) not in (message, None):
            return keyword
    return max(keywords, key=lambda keyword: len(json.dumps(schema[keyword])), default=None)


def refuse_constant(name: str) -> object:
    """For json.loads, which takes NaN and Infinity otherwise. Raises ValueError."""
    raise ValueError(f"{name} is no JSON")


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
    raise GrammarError(f"it holds more than {MAX_DEPTH} objects and lists inside each other")


def _walk(schema: Schema) -> Iterator[_Child]:
    """A schema and all its subschemas, in the order of the text."""
    stack = [_Child("", schema)]
    while stack:
        child = stack.pop()
        yield child
        stack += reversed(list(_children(child)))


def _children(parent: _Child) -> Iterator[_Child]:
    if not isinstance(parent.schema, dict):
        return
    for keyword, value in parent.schema.items():
        pointer = f"{parent.pointer}/{_escape(keyword)}"
        if keyword in _SCHEMA_MAPS and isinstance(value, dict):
            for name, child in value.items():
                yield _Child(f"{pointer}/{_escape(name)}", child)
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            for index, child in enumerate(value):
                yield _Child(f"{pointer}/{index}", child)
        elif keyword in _SCHEMA or keyword in _SCHEMA_TOO:
            yield _Child(pointer, value)


def _target(root: object, place: _Child) -> Iterator[_Child]:
    """What a local $ref points to."""
    reference = place.schema.get("$ref") if isinstance(place.schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return
    found = root
    for part in reference[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return
        found = found[name]
    yield _Child(reference[1:], found)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _close(schema: Schema) -> Schema:
    """A copy in which objects have no properties but those that are named."""
    copy: Schema = json.loads(json.dumps(schema))
    for child in _walk(copy):
        if isinstance(child.schema, dict) and ("properties" in child.schema or "patternProperties" in child.schema):
            child.schema.setdefault("additionalProperties", False)
    return copy
