"""Turn a part of a tool's schema into a self-contained schema."""

from __future__ import annotations

import json
from collections.abc import Mapping

from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.schema_walk import walk

# Keywords of the whole that a part is read with.
_CONTEXT = ("$schema", "$defs", "definitions", "x-guidance")
_DEFINITIONS = ("#/$defs/", "#/definitions/")

Schema = Mapping[str, object]


def detach_part(schema: Schema, root: Schema) -> Schema:
    """Return a part of `root` together with everything it refers to; the part itself if `root` is empty.

    Raises GrammarError.
    """
    if not root:
        return schema
    part: dict[str, object] = json.loads(
        json.dumps({**{name: root[name] for name in _CONTEXT if name in root}, **schema})
    )
    if not any(_points_outside(child.schema) for child in walk(part)):
        return part
    definitions = part.setdefault("$defs", {})
    if not isinstance(definitions, dict):
        return part
    name = "root"
    while name in definitions:
        name += "_"
    definitions[name] = json.loads(json.dumps({key: root[key] for key in root if key not in ("$id", "id", *_CONTEXT)}))
    for child in walk(part):
        if isinstance(child.schema, dict) and any(isinstance(child.schema.get(key), str) for key in ("$id", "id")):
            raise GrammarError("beside a URI it cannot be enforced in this model's format", keyword="$ref")
        if _points_outside(child.schema):
            assert isinstance(child.schema, dict)
            child.schema["$ref"] = f"#/$defs/{name}{child.schema['$ref'][1:]}"
    return part


def _points_outside(schema: object) -> bool:
    """Whether a schema is a reference to something other than a definition."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    return reference == "#" or (reference.startswith("#/") and not reference.startswith(_DEFINITIONS))
