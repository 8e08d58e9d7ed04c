"""What a schema says about objects and lists, for formats other than JSON, which refuse what they cannot enforce."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from serve_llm.server.dialects.dialect import Codec, GemmaCodec, JsonCodec, PythonicCodec, TaggedCodec, get_forms
from serve_llm.server.dialects.literal_codec import BARE_KEY
from serve_llm.server.dialects.schema_types import MAX_DEPTH, find_types, follow_reference
from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.schema_walk import KEYWORDS

Schema = Mapping[str, object]

BESIDE = {"$defs", "definitions", "x-guidance"}  # keywords that restrict no value
CANNOT = "it cannot be enforced in this model's format"
NOT_BESIDE = "it cannot be enforced beside others in this model's format"
MAX_ITEMS = 100  # maximum for minItems, maxItems and prefixItems

GENERAL = frozenset(
    "allOf anyOf oneOf not if then else $ref $dynamicRef $recursiveRef const enum disallow divisibleBy extends".split()
)
_OF_OBJECTS = GENERAL | frozenset(
    "patternProperties propertyNames minProperties maxProperties dependencies dependentRequired dependentSchemas "
    "unevaluatedProperties".split()
)
_OF_LISTS = GENERAL | frozenset("additionalItems contains minContains maxContains unevaluatedItems".split())


class Member(NamedTuple):
    """A property of an object."""

    name: str
    schema: object
    is_required: bool


class ListForm(NamedTuple):
    first: list[object]  # schemas of the first items
    others: object  # schema of the others
    least: int
    most: int | None


@contextmanager
def located(*path: str) -> Iterator[None]:
    """Add the location of the part in the schema to the pointer of an error."""
    try:
        yield
    except GrammarError as error:
        pointer = "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in path)
        is_absolute = error.pointer.startswith(("/$defs/", "/definitions/"))
        raise GrammarError(
            error.message, error.pointer if is_absolute else pointer + error.pointer, error.keyword
        ) from None


def resolve_alone(schema: object, root: Schema) -> object:
    """Like `resolve`. Raises GrammarError if there is nothing, or if there are other keywords next to a reference."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        if not KEYWORDS.isdisjoint(schema.keys() - {"$ref"} - BESIDE):
            raise GrammarError(NOT_BESIDE, keyword="$ref")
        schema = follow_reference(schema["$ref"], root)
        if schema is None:
            raise GrammarError("it points to nothing", keyword="$ref")
    raise GrammarError("it points to too many others", keyword="$ref")


def resolve_object(schema: object, root: Schema) -> Schema:
    """Return the schema of an object, without reference. Raises GrammarError."""
    found = resolve_alone(schema, root)
    if not isinstance(found, Mapping) or set(find_types(found, root)) - {"null"} != {"object"}:
        raise GrammarError("it must be the schema of an object", keyword="type")
    return found


def list_members(schema: object, root: Schema, codec: Codec) -> list[Member]:
    """Return the properties of an object, in order. root: the schema that references point into. Raises
    GrammarError."""
    found = resolve_object(schema, root)
    _refuse(found, _OF_OBJECTS)
    properties = found.get("properties", {})
    required = found.get("required", [])
    if not isinstance(properties, Mapping):
        raise GrammarError("it must be an object", keyword="properties")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise GrammarError("it must be a list of names", keyword="required")
    others = found.get("additionalProperties", True)
    members = []
    for name in dict.fromkeys([*properties, *required]):
        member = Member(name, properties.get(name, others), name in required)
        if member.schema is not False:
            _check_name(name, codec)
            members.append(member)
        elif member.is_required:
            raise GrammarError(f"no value of {name!r} is valid", keyword="required")
    return members


def is_any_object(schema: Schema) -> bool:
    """Whether a schema says only that a value is an object."""
    if schema.get("properties") or schema.get("required") or any(keyword in schema for keyword in _OF_OBJECTS):
        return False
    return schema.get("additionalProperties", True) in (True, {})


def read_list(schema: Schema) -> ListForm:
    """Raises GrammarError."""
    _refuse(schema, _OF_LISTS)
    if schema.get("uniqueItems", False) is not False:
        raise GrammarError(CANNOT, keyword="uniqueItems")
    first = schema.get("prefixItems", [])
    least = schema.get("minItems", 0)
    most = schema.get("maxItems")
    others = schema.get("items", True)
    if not isinstance(first, list) or len(first) > MAX_ITEMS:
        raise GrammarError(
            f"it must be a list of at most {MAX_ITEMS} schemas in this model's format", keyword="prefixItems"
        )
    if not isinstance(others, Mapping | bool):
        raise GrammarError("it must be a schema in this model's format", keyword="items")
    for keyword, value in (("minItems", least), ("maxItems", most)):
        if value is not None and (not isinstance(value, int) or not 0 <= value <= MAX_ITEMS):
            raise GrammarError(f"it must be 0 to {MAX_ITEMS} in this model's format", keyword=keyword)
    assert isinstance(least, int) and isinstance(most, int | None)
    if others is False:
        most = min(len(first), len(first) if most is None else most)
    if most is not None and least > most:
        raise GrammarError("the minimum is greater than the maximum number of items", keyword="minItems")
    return ListForm(first[:most], others, least, most)


def _refuse(schema: Schema, keywords: Collection[str]) -> None:
    for keyword in schema:
        if keyword in keywords:
            raise GrammarError(CANNOT, keyword=keyword)


def list_names(schema: object) -> Iterator[str]:
    """Yield the names of all properties that a schema declares, at any depth. The schema may be malformed."""
    stack = [schema]
    while stack:
        found = stack.pop()
        if isinstance(found, Mapping):
            properties = found.get("properties")
            if isinstance(properties, Mapping):
                yield from properties
            stack += found.values()
        elif isinstance(found, list):
            stack += found


def can_write_name(name: str, codec: Codec) -> bool:
    """Whether the format can write the name of an argument so that the parser reads it back."""
    match codec:
        case TaggedCodec():
            ends = [form.strip()[0] for form in [*get_forms(codec.key_end), codec.json_key_end] if form.strip()]
            return bool(name) and name == name.strip() and not any(end in name for end in ends)
        case PythonicCodec() | GemmaCodec():
            return re.fullmatch(BARE_KEY, name) is not None
        case JsonCodec():
            return True


def _check_name(name: str, codec: Codec) -> None:
    if not can_write_name(name, codec):
        raise GrammarError(f"the name {name!r} cannot be written in this model's format", keyword="properties")
