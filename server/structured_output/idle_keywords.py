"""Keywords of JSON schemas that allow every value where they occur, but that llguidance refuses."""

from __future__ import annotations

from collections.abc import Iterator, Set

from serve_llm.server.structured_output.schema_walk import ANNOTATIONS, Schema

# Subschemas that apply to the same object: properties that they evaluate are not unevaluated.
_IN_PLACE = frozenset(
    "$dynamicRef $recursiveRef $ref allOf anyOf dependencies dependentSchemas else if not oneOf then".split()
)


def drop_idle_keywords(schema: Schema, pointed: Set[str], *, is_before_2019: bool) -> None:
    """Drop the keywords from one subschema, in place.

    pointed: keywords to keep. is_before_2019: whether the schema's draft has neither `minContains` nor
    `unevaluatedProperties`.
    """
    for keyword in list(_list_idle(schema, is_before_2019=is_before_2019)):
        if keyword not in pointed:
            schema.pop(keyword, None)
    if is_before_2019 or "additionalProperties" in schema or not _IN_PLACE.isdisjoint(schema):
        return
    if "unevaluatedProperties" in schema:
        schema["additionalProperties"] = schema.pop("unevaluatedProperties")


def _list_idle(schema: Schema, *, is_before_2019: bool) -> Iterator[str]:
    if schema.get("uniqueItems") is False or _has_one_item(schema):
        yield "uniqueItems"
    if "additionalProperties" in schema or allows_all(schema.get("unevaluatedProperties")):
        yield "unevaluatedProperties"
    if isinstance(schema.get("items"), dict | bool) or allows_all(schema.get("unevaluatedItems")):
        yield "unevaluatedItems"
    if "contains" not in schema or _may_contain_none(schema, is_before_2019=is_before_2019):
        yield from ("contains", "minContains", "maxContains")
    if "if" not in schema or all(allows_all(schema.get(keyword, True)) for keyword in ("then", "else")):
        yield from ("if", "then", "else")
    if schema.get("not") is False:
        yield "not"


def allows_all(schema: object) -> bool:
    return schema is True or (isinstance(schema, dict) and not set(schema) - ANNOTATIONS)


def _has_one_item(schema: Schema) -> bool:
    most = schema.get("maxItems")
    types = schema.get("type", "array")
    return (type(most) is int and most <= 1) or ("array" not in types if isinstance(types, list) else types != "array")


def _may_contain_none(schema: Schema, *, is_before_2019: bool) -> bool:
    return schema.get("minContains") == 0 and "maxContains" not in schema and not is_before_2019
