"""Whether two JSON schemas have no valid value in common, in cases that are easy to decide."""

from __future__ import annotations

import re
from collections.abc import Iterator

from serve_llm.server.structured_output.schema_walk import Schema, Subschema, find_targets, list_resources

_TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))  # integers are numbers
_MAX_WORK = 50_000  # limit on the subschemas and values to examine
_MAX_DEPTH = 6
MAX_NEGATIONS = 3000  # limit on subschemas written as opposites of parts: they double the contents


class _OutOfWork(Exception):
    """The limit on work is reached."""


class DisjointSchemas:
    """Answers questions about the parts of one schema, whose references it follows."""

    def __init__(self, root: Schema) -> None:
        self._root = Subschema("", root)
        self._has_one_resource = sum(1 for _ in list_resources(self._root)) == 1
        self.knows_const = not re.search("draft-0[34]", str(root.get("$schema")))  # and contains
        options = root.get("x-guidance")
        self.coerces_one_of = isinstance(options, dict) and options.get("coerce_one_of") is True
        self._work_left = _MAX_WORK
        self.negations_left = MAX_NEGATIONS

    def check(self, one: object, other: object) -> bool:
        """True if no value is valid under both; False if there may be one."""
        try:
            return self._check(one, other, _MAX_DEPTH)
        except _OutOfWork:
            return False

    def _work(self, amount: int) -> None:
        self._work_left -= amount
        if self._work_left < 0:
            raise _OutOfWork

    def _check(self, one: object, other: object, depth: int) -> bool:
        if not depth:
            return False
        ones = list(self._list_conjuncts(one, _MAX_DEPTH))
        others = list(self._list_conjuncts(other, _MAX_DEPTH))
        if False in ones or False in others:
            return True
        types = self._find_types(ones, depth) & self._find_types(others, depth)
        if not types:
            return True
        some = self._list_values(ones)
        more = self._list_values(others)
        if some is not None and more is not None and not some & more:
            return True
        for ways in _list_ways(ones):
            if all(self._check(way, other, depth - 1) for way in ways):
                return True
        for ways in _list_ways(others):
            if all(self._check(one, way, depth - 1) for way in ways):
                return True
        return types == {"object"} and self._have_disjoint_members(ones, others, depth)

    def _have_disjoint_members(self, ones: list[object], others: list[object], depth: int) -> bool:
        """Whether a key that one side requires cannot have a value that both allow."""
        return any(
            self._check(some, more, depth - 1)
            for name in [*_list_required(ones), *_list_required(others)]
            for some in _list_members_named(ones, name)
            for more in _list_members_named(others, name)
        )

    def _list_conjuncts(self, schema: object, depth: int) -> Iterator[object]:
        """List objects and booleans that must all be valid. Keywords next to a $ref are ignored, as before draft
        2019-09."""
        self._work(1)
        if not depth:
            return
        if isinstance(schema, bool):
            yield schema
        elif isinstance(schema, dict) and "$ref" in schema:
            for target in self.resolve(schema):
                yield from self._list_conjuncts(target, depth - 1)
        elif isinstance(schema, dict):
            yield schema
            parts = schema.get("allOf")
            for part in parts if isinstance(parts, list) else ():
                yield from self._list_conjuncts(part, depth - 1)

    def resolve(self, schema: Schema) -> Iterator[object]:
        """Yield what the `$ref` of a schema leads to; nothing if that is hard to determine."""
        if self._has_one_resource and str(schema["$ref"]).startswith("#/"):
            for target in find_targets(self._root, Subschema("", schema)):
                yield target.schema

    def _find_types(self, conjuncts: list[object], depth: int) -> frozenset[str]:
        types = _TYPES
        for schema in conjuncts:
            if not isinstance(schema, dict):
                continue
            declared = schema.get("type")
            names = [declared] if isinstance(declared, str) else declared
            if isinstance(names, list) and all(isinstance(name, str) for name in names):
                types &= {"number" if name == "integer" else name for name in names}
            if (values := self._list_values([schema])) is not None:
                types &= {name for name, _ in values}
            for ways in _list_ways([schema]) if depth > 1 else ():
                found = [self._find_types(list(self._list_conjuncts(way, depth - 1)), depth - 1) for way in ways]
                types &= frozenset().union(*found)
        return types

    def _list_values(self, conjuncts: list[object]) -> set[tuple[str, object]] | None:
        """List the types and values that const and enum allow; None if there is neither."""
        values: set[tuple[str, object]] | None = None
        for schema in conjuncts:
            if not isinstance(schema, dict):
                continue
            if isinstance(schema.get("enum"), list):
                self._work(len(schema["enum"]))
                found = {_freeze(value) for value in schema["enum"]}
                values = found if values is None else values & found
            if "const" in schema and self.knows_const:
                found = {_freeze(schema["const"])}
                values = found if values is None else values & found
        return values


def _list_ways(conjuncts: list[object]) -> Iterator[list[object]]:
    for schema in conjuncts:
        for keyword in ("anyOf", "oneOf"):
            ways = schema.get(keyword) if isinstance(schema, dict) else None
            if isinstance(ways, list) and ways:
                yield ways


def _list_required(conjuncts: list[object]) -> Iterator[str]:
    for schema in conjuncts:
        names = schema.get("required") if isinstance(schema, dict) else None
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str):
                yield name


def _list_members_named(conjuncts: list[object], name: str) -> Iterator[object]:
    """List the schemas of the value of a key."""
    yield True
    for schema in conjuncts:
        if not isinstance(schema, dict):
            continue
        properties = schema.get("properties", {})
        if isinstance(properties, dict) and name in properties:
            yield properties[name]
        elif "patternProperties" not in schema and "additionalProperties" in schema:
            yield schema["additionalProperties"]


def _freeze(value: object) -> tuple[str, object]:
    """Return a hashable form of JSON's type and value, so that equal values are equal."""
    if value is None:
        return "null", None
    if isinstance(value, bool):
        return "boolean", value
    if isinstance(value, int | float):
        return "number", value
    if isinstance(value, str):
        return "string", value
    if isinstance(value, list):
        return "array", tuple(_freeze(member) for member in value)
    assert isinstance(value, dict)
    return "object", frozenset((name, _freeze(member)) for name, member in value.items())
