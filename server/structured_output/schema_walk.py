"""Iterate over the subschemas of a JSON schema, including those that references lead to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import unquote

Schema = dict[str, object]

_SCHEMA = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames")
_SCHEMA_TOO = ("then", "unevaluatedItems", "unevaluatedProperties")
_SCHEMA_MAPS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_SCHEMA_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
SUBSCHEMA_KEYWORDS = {*_SCHEMA, *_SCHEMA_TOO, *_SCHEMA_MAPS, *_SCHEMA_LISTS}
IGNORED_BY_COMPILER = ("disallow", "divisibleBy", "extends")  # keywords from draft 3

KEYWORDS = {*SUBSCHEMA_KEYWORDS, *IGNORED_BY_COMPILER}
KEYWORDS |= {"$dynamicRef", "$recursiveRef", "$ref", "const", "contentEncoding", "dependentRequired"}
KEYWORDS |= {"enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxContains", "maxItems", "maxLength"}
KEYWORDS |= {"maxProperties", "maximum", "minContains", "minItems", "minLength", "minProperties", "minimum"}
KEYWORDS |= {"multipleOf", "pattern", "required", "type", "uniqueItems", "x-guidance"}
ANNOTATIONS = frozenset(("$comment", "default", "deprecated", "description", "examples", "title"))


class Subschema(NamedTuple):
    pointer: str
    schema: object


def walk(schema: Schema) -> Iterator[Subschema]:
    """Yield a schema and all its subschemas, in the order of the text. The target of a $ref is one, wherever it is."""
    root = Subschema("", schema)
    resources = {resource.pointer: resource for resource in list_resources(root)}
    by_name: dict[str, list[Subschema]] = {}  # by the end of the URI
    for resource in resources.values():
        by_name.setdefault(_get_uri_name(resource.schema), []).append(resource)
    seen: set[str] = set()
    stack = [root]
    while stack:
        child = stack.pop()
        if child.pointer in seen:
            continue
        seen.add(child.pointer)
        yield child
        if isinstance(child.schema, dict) and isinstance(reference := child.schema.get("$ref"), str):
            name = reference.partition("#")[0].rpartition("/")[2]
            around = [resources[pointer] for pointer in _list_prefixes(child.pointer) if pointer in resources]
            bases = [*around, *by_name.get(name, ())] if name else around
            stack += [target for base in bases for target in find_targets(base, child)]
        stack += reversed(list(list_subschemas(child)))


def list_resources(root: Subschema) -> Iterator[Subschema]:
    """List the possible starting points of a $ref's pointer: the whole schema and every part with its own URI."""
    yield root
    stack = [root]
    while stack:
        parent = stack.pop()
        if parent is not root and isinstance(parent.schema, dict):
            if any(isinstance(parent.schema.get(name), str) for name in ("$id", "id")):
                yield parent
        for name, value in list_members(parent.schema):
            stack.append(Subschema(f"{parent.pointer}/{_escape(name)}", value))


def _get_uri_name(schema: object) -> str:
    assert isinstance(schema, dict)
    uri = next((schema[name] for name in ("$id", "id") if isinstance(schema.get(name), str)), "")
    assert isinstance(uri, str)
    return uri.partition("#")[0].rpartition("/")[2]


def _list_prefixes(pointer: str) -> Iterator[str]:
    """Yield a JSON pointer and those of its ancestors."""
    yield pointer
    while pointer:
        pointer = pointer.rpartition("/")[0]
        yield pointer


def list_members(value: object) -> Iterable[tuple[str, object]]:
    """Return members by their names in a JSON pointer."""
    if isinstance(value, dict):
        return value.items()
    if isinstance(value, list):
        return [(str(index), member) for index, member in enumerate(value)]
    return ()


def list_subschemas(parent: Subschema) -> Iterator[Subschema]:
    if not isinstance(parent.schema, dict):
        return
    for keyword, value in parent.schema.items():
        pointer = f"{parent.pointer}/{_escape(keyword)}"
        if keyword in _SCHEMA_MAPS and isinstance(value, dict):
            for name, child in value.items():
                yield Subschema(f"{pointer}/{_escape(name)}", child)
        elif keyword in _SCHEMA_LISTS and isinstance(value, list):
            for index, child in enumerate(value):
                yield Subschema(f"{pointer}/{index}", child)
        elif keyword in _SCHEMA or keyword in _SCHEMA_TOO:
            yield Subschema(pointer, value)


def add_part(schema: Schema, part: Schema | bool) -> None:
    """Require a part to be valid too. A malformed allOf stays unchanged, to be refused."""
    others = schema.setdefault("allOf", [])
    if isinstance(others, list):
        others.append(part)


def find_targets(resource: Subschema, place: Subschema) -> Iterator[Subschema]:
    """Yield what the pointer of a $ref leads to from a resource, if anything."""
    reference = place.schema.get("$ref") if isinstance(place.schema, dict) else None
    if not isinstance(reference, str):
        return
    fragment = unquote(reference.partition("#")[2])
    if not fragment.startswith("/"):
        return
    pointer, found = resource
    for part in fragment[1:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and len(name) < 9 and int(name) < len(found):
            found = found[int(name)]
        else:
            return
        pointer += f"/{_escape(name)}"
    yield Subschema(pointer, found)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
