"""The types that a tool's schema gives an argument."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from serve_llm.server.dialects.tool import Tool
from serve_llm.server.structured_output.schema_walk import Subschema, find_targets

ALL_TYPES = ("null", "boolean", "integer", "number", "object", "array", "string")

MAX_DEPTH = 10  # maximum nesting of references and alternatives


def find_argument_types(tool: Tool | None, key: str) -> frozenset[str]:
    """Return the JSON types that an argument may have; string if nothing is known about it."""
    properties = tool.parameters.get("properties") if tool is not None else None
    if tool is None or not isinstance(properties, Mapping) or key not in properties:
        return frozenset(("string",))
    types = find_types(properties[key], tool.parameters, nullable=True)
    return frozenset(types) or frozenset(("string",))


def find_type(value: object) -> str:
    """Return the JSON type of a value from a JSON parser."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def resolve(schema: object, root: Mapping[str, object]) -> object:
    """Return the schema that a local reference points to; a schema without reference as it is; None if there is
    none."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = follow_reference(schema["$ref"], root)
    return None


def follow_reference(reference: str, root: Mapping[str, object]) -> object:
    """Return what a local reference points to; None if there is nothing."""
    if reference == "#":
        return root
    if not reference.startswith("#"):
        return None
    targets = find_targets(Subschema("", root), Subschema("", {"$ref": reference}))
    return next((target.schema for target in targets), None)


def find_types(schema: object, root: Mapping[str, object], depth: int = 0, *, nullable: bool = False) -> Iterator[str]:
    """Yield the types that a schema names; empty if it names none. root: the schema that references point into.
    nullable: include null if OpenAPI's keyword `nullable` allows it."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return
    declared = schema.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (name for name in declared if isinstance(name, str))
    elif "const" in schema:
        yield find_type(schema["const"])
    elif isinstance(schema.get("enum"), list):
        yield from (find_type(value) for value in schema["enum"])
    else:
        for keyword in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(keyword)
            for part in parts if isinstance(parts, list) else ():
                yield from find_types(part, root, depth + 1, nullable=nullable)
        if not any(keyword in schema for keyword in ("anyOf", "oneOf", "allOf")):
            if "properties" in schema:
                yield "object"
            elif "items" in schema:
                yield "array"
    if nullable and schema.get("nullable") is True:
        yield "null"
