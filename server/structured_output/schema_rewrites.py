"""Rewrite JSON schemas with other keywords of the same meaning, where llguidance lacks one or reads it differently."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from itertools import combinations

from serve_llm.server.structured_output.disjoint import DisjointSchemas
from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.negation import are_names, join, negate
from serve_llm.server.structured_output.pattern import split_lookahead, translate_pattern
from serve_llm.server.structured_output.property_names import rewrite_property_names
from serve_llm.server.structured_output.schema_walk import ANNOTATIONS, Schema, add_part
from serve_llm.server.structured_output.string_formats import normalize_format

_INT32 = 2**31

_MAX_NAMED = 16  # maximum number of properties of which one is required
_MAX_WAYS = 50  # maximum number of branches of oneOf
_MAX_OVERLAPS = 100  # maximum pairs of branches that may both be valid: each is written with the opposite of the other

# Subschemas that apply to the same object: properties that they evaluate are not unevaluated.
_IN_PLACE = frozenset(
    "$dynamicRef $recursiveRef $ref allOf anyOf dependencies dependentSchemas else if not oneOf then".split()
)


def rewrite_keywords(schema: Schema, disjoint: DisjointSchemas, pointed: Set[str], draft: object) -> None:
    """Rewrite one subschema in place. Raises GrammarError with the keyword and without the place.

    pointed: names in the schema's references. A keyword among them stays, because a reference may lead through it.
    draft: the schema's `$schema`.
    """
    _drop_idle_keywords(schema, pointed, is_before_2019="draft-0" in str(draft))
    _rewrite_patterns(schema)
    _rewrite_format(schema)
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        if keyword not in pointed:
            _rewrite_dependencies(schema, keyword)
    if "not" not in pointed:
        _rewrite_not(schema, disjoint)
    if pointed.isdisjoint(("if", "then", "else")) and not re.search("draft-0[346]", str(draft)):
        _rewrite_if(schema, disjoint)
    if "oneOf" not in pointed:
        _rewrite_one_of(schema, disjoint)
    if "propertyNames" not in pointed:
        rewrite_property_names(schema, disjoint)
    _rewrite_min_properties(schema)
    _join_patterns(schema)


def _drop_idle_keywords(schema: Schema, pointed: Set[str], *, is_before_2019: bool) -> None:
    """Drop keywords that allow every value where they occur, but that llguidance refuses, from one subschema, in place.

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
    if "additionalProperties" in schema or _allows_all(schema.get("unevaluatedProperties")):
        yield "unevaluatedProperties"
    if isinstance(schema.get("items"), dict | bool) or _allows_all(schema.get("unevaluatedItems")):
        yield "unevaluatedItems"
    if "contains" not in schema or _may_contain_none(schema, is_before_2019=is_before_2019):
        yield from ("contains", "minContains", "maxContains")
    if "if" not in schema or all(_allows_all(schema.get(keyword, True)) for keyword in ("then", "else")):
        yield from ("if", "then", "else")
    if schema.get("not") is False:
        yield "not"


def _allows_all(schema: object) -> bool:
    return schema is True or (isinstance(schema, dict) and not set(schema) - ANNOTATIONS)


def _has_one_item(schema: Schema) -> bool:
    most = schema.get("maxItems")
    types = schema.get("type", "array")
    return (type(most) is int and most <= 1) or ("array" not in types if isinstance(types, list) else types != "array")


def _may_contain_none(schema: Schema, *, is_before_2019: bool) -> bool:
    return schema.get("minContains") == 0 and "maxContains" not in schema and not is_before_2019


def _rewrite_patterns(schema: Schema) -> None:
    for keyword in ("pattern", "patternProperties"):
        found = schema.get(keyword)
        try:
            if isinstance(found, str):
                if parts := split_lookahead(found):
                    found, other = parts
                    add_part(schema, {"pattern": other})
                schema[keyword] = translate_pattern(found)
            elif isinstance(found, dict):
                translated = {translate_pattern(name): value for name, value in found.items()}
                if len(translated) < len(found):
                    raise GrammarError("two of its expressions are the same")
                schema[keyword] = translated
        except GrammarError as error:
            raise GrammarError(error.message, keyword=keyword) from None


def _rewrite_format(schema: Schema) -> None:
    """Handle formats. int32 is OpenAPI's; its int64, float and double match every number that is written."""
    name = schema.get("format")
    if not isinstance(name, str):
        return
    found = normalize_format(name)
    if found is None:
        del schema["format"]
    else:
        schema["format"] = found
    if name == "int32":
        add_part(schema, {"minimum": -_INT32, "maximum": _INT32 - 1})


def _rewrite_dependencies(schema: Schema, keyword: str) -> None:
    """Rewrite what must hold if an object has a property: it has others, or a schema is valid."""
    found = schema.get(keyword)
    if not isinstance(found, dict):
        return
    wanted = {name: [value] if isinstance(value, str) else value for name, value in found.items()}
    if not all(isinstance(value, dict) or value == [] or are_names(value) for value in wanted.values()):
        return
    del schema[keyword]
    for name, value in wanted.items():
        if value:
            holds = value if isinstance(value, dict) else {"required": value}
            add_part(schema, {"anyOf": [{"properties": {name: False}}, holds]})


def _rewrite_not(schema: Schema, disjoint: DisjointSchemas) -> None:
    if "not" not in schema:
        return
    negated = negate(schema["not"], disjoint)
    if negated is None and not _allows_numbers(schema):
        negated = negate(_replace_integers(schema["not"]), disjoint)
    if negated is not None:
        del schema["not"]
        add_part(schema, negated)


def _allows_numbers(schema: Schema) -> bool:
    types = schema.get("type", "number")
    return "number" in types if isinstance(types, list) else types == "number"


def _replace_integers(schema: object) -> object:
    """Return a replacement that excludes the same values next to a type that has no numbers, or only integers."""
    if not isinstance(schema, dict) or "type" not in schema:
        return schema
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": ["number" if name == "integer" else name for name in named]}


def _rewrite_one_of(schema: Schema, disjoint: DisjointSchemas) -> None:
    """Rewrite oneOf: each branch excludes what other branches allow too, unless it does so by itself."""
    found = schema.get("oneOf")
    if not isinstance(found, list) or not 1 < len(found) <= _MAX_WAYS:
        return
    overlaps = [
        (one, other)
        for one, other in combinations(range(len(found)), 2)
        if not disjoint.check(found[one], found[other])
    ]
    if overlaps and (disjoint.coerces_one_of or len(overlaps) > _MAX_OVERLAPS):
        return
    ways: list[list[Schema | bool]] = [[way] for way in found]
    for one, other in [*overlaps, *((other, one) for one, other in overlaps)]:
        negated = negate(found[other], disjoint, _find_keys(found[one], disjoint) or _find_keys(schema, disjoint))
        if negated is None:
            return
        ways[one].append(negated)
    del schema["oneOf"]
    add_part(schema, join("anyOf", [join("allOf", way) for way in ways]))


def _find_keys(schema: object, disjoint: DisjointSchemas) -> Set[str] | None:
    """Return all keys that objects may have under a schema, if it lists them."""
    if isinstance(schema, dict) and "$ref" in schema:
        targets = list(disjoint.resolve(schema))
        schema = targets[0] if len(targets) == 1 else None
    if not isinstance(schema, dict) or "$ref" in schema or "patternProperties" in schema:
        return None
    named = schema.get("properties", {})
    return set(named) if schema.get("additionalProperties") is False and isinstance(named, dict) else None


def _rewrite_if(schema: Schema, disjoint: DisjointSchemas) -> None:
    if "if" not in schema:
        return
    negated = negate(schema["if"], disjoint)
    condition, then, otherwise = (_to_schema(schema.get(keyword, True)) for keyword in ("if", "then", "else"))
    if negated is None or condition is None or then is None or otherwise is None:
        return
    for keyword in ("if", "then", "else"):
        schema.pop(keyword, None)
    add_part(schema, join("anyOf", [join("allOf", [condition, then]), join("allOf", [negated, otherwise])]))


def _to_schema(value: object) -> Schema | bool | None:
    """Return None for anything that is not a schema."""
    return value if isinstance(value, dict | bool) else None


def _rewrite_min_properties(schema: Schema) -> None:
    """Require at least one property, which may be a named one or another."""
    named = schema.get("properties")
    required = schema.get("required", [])
    if schema.get("minProperties") != 1 or not isinstance(named, dict) or not isinstance(required, list):
        return
    if required:
        del schema["minProperties"]
        return
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    ways = [{"required": [name]} for name, value in named.items() if value is not False]
    if ways and not is_closed and len(named) <= _MAX_NAMED:
        del schema["minProperties"]
        add_part(schema, {"anyOf": [*ways, {"properties": dict.fromkeys(named, False), "minProperties": 1}]})


def _join_patterns(schema: Schema) -> None:
    """Combine keywords. llguidance reads those before and after anyOf, enum and so on separately."""
    if "patternProperties" in schema and "additionalProperties" in schema:
        names = ("properties", "patternProperties", "additionalProperties")
        joined = {name: schema.pop(name) for name in names if name in schema}
        schema.update(joined | {name: schema.pop(name) for name in list(schema)})
