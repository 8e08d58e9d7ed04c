"""`propertyNames` as `patternProperties`, which llguidance has."""

from __future__ import annotations

from serve_llm.server.structured_output.disjoint import DisjointSchemas
from serve_llm.server.structured_output.pattern import quote_pattern
from serve_llm.server.structured_output.schema_walk import ANNOTATIONS, Schema, add_part
from serve_llm.server.structured_output.string_formats import FORMATS, normalize_format

_MAX_REFERENCES = 8  # that lead to each other


def rewrite_property_names(schema: Schema, disjoint: DisjointSchemas) -> None:
    """What cannot be written stays, to be refused."""
    if "propertyNames" not in schema:
        return
    allowed = _write_pattern(schema["propertyNames"], disjoint, _MAX_REFERENCES)
    if allowed is None:
        return
    del schema["propertyNames"]
    if allowed is not True:
        patterns: Schema = {"patternProperties": {allowed: True}} if allowed else {}
        add_part(schema, {**patterns, "additionalProperties": False})


def _write_pattern(schema: object, disjoint: DisjointSchemas, references_left: int) -> str | bool | None:
    """An expression for the names that are valid; True if all are, False if none is, None if it cannot be written."""
    if isinstance(schema, bool) or not isinstance(schema, dict):
        return schema if isinstance(schema, bool) else None
    keywords = set(schema) - ANNOTATIONS
    if keywords == {"$ref"} and references_left:
        targets = list(disjoint.resolve(schema))
        return _write_pattern(targets[0], disjoint, references_left - 1) if len(targets) == 1 else None
    types = schema.get("type", "string")
    if types != "string" and not (isinstance(types, list) and "string" in types):
        return False if isinstance(types, str | list) else None
    keywords.discard("type")
    if not keywords:
        return True
    if keywords == {"pattern"}:
        pattern = schema["pattern"]
        return pattern if isinstance(pattern, str) else None
    if keywords == {"format"}:
        return _write_format(schema["format"])
    if keywords <= {"minLength", "maxLength"}:
        return _write_lengths(schema.get("minLength", 0), schema.get("maxLength"))
    if keywords not in ({"enum"}, {"const"}):
        return None
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list):
        return None
    texts = [quote_pattern(value) for value in values if isinstance(value, str)]
    return f"^(?:{'|'.join(texts)})$" if texts else False


def _write_format(name: object) -> str | bool | None:
    known = normalize_format(name)
    if known is None:
        return True if isinstance(name, str) else None
    return f"^(?:{FORMATS[known]})$" if known in FORMATS else None


def _write_lengths(least: object, most: object) -> str | bool | None:
    if type(least) is not int or least < 0 or (most is not None and (type(most) is not int or most < 0)):
        return None
    if isinstance(most, int) and most < least:
        return False
    return f"^(?s:.{{{least},{'' if most is None else most}}})$"
