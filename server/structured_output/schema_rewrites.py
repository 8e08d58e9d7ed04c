"""Write JSON schemas in other keywords of the same meaning, where llguidance lacks one or reads it differently."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import combinations

from serve_llm.server.structured_output.disjoint import DisjointSchemas
from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.idle_keywords import drop_idle_keywords
from serve_llm.server.structured_output.pattern import split_lookahead, translate_pattern
from serve_llm.server.structured_output.property_names import rewrite_property_names
from serve_llm.server.structured_output.schema_walk import ANNOTATIONS, Schema, add_part
from serve_llm.server.structured_output.string_formats import normalize_format

_INT32 = 2**31

_MAX_NAMED = 16  # properties of which one must be there
_TYPES = ("null", "boolean", "object", "array", "number", "string")
_MAX_WAYS = 50  # that oneOf may have: each is written with the opposite of all others


def rewrite_keywords(schema: Schema, disjoint: DisjointSchemas, pointed: Set[str], draft: object) -> None:
    """Rewrite one subschema in place. Raises GrammarError with the keyword and without the place.

    pointed: names in the schema's references. A keyword among them stays, because a reference may lead through it.
    draft: the schema's `$schema`.
    """
    drop_idle_keywords(schema, pointed, is_before_2019="draft-0" in str(draft))
    _rewrite_patterns(schema)
    _rewrite_format(schema)
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        if keyword not in pointed:
            _rewrite_dependencies(schema, keyword)
    if "not" not in pointed:
        _rewrite_not(schema)
    if "oneOf" not in pointed:
        _rewrite_one_of(schema, disjoint)
    if "propertyNames" not in pointed:
        rewrite_property_names(schema, disjoint)
    _rewrite_min_properties(schema)
    _join_patterns(schema)


def negate(schema: object) -> Schema | None:
    """What is valid where `schema` is not; None if it is not known how to write that."""
    if not isinstance(schema, dict):
        return None
    parts = []
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS:
            continue
        part = _negate_keyword(keyword, value)
        if part is None:
            return None
        parts.append(part)
    return _join("anyOf", parts)


def _negate_keyword(keyword: str, value: object) -> Schema | None:
    if keyword == "not":
        return value if isinstance(value, dict) else None
    if keyword == "type":  # no expression matches numbers that are no integers
        named = value if isinstance(value, list) else [value]
        if any(name not in (*_TYPES, "integer") for name in named) or ("integer" in named and "number" not in named):
            return None
        others = [name for name in _TYPES if name not in named]
        return {"type": others} if others else None
    if keyword == "required" and isinstance(value, list) and _are_names(value):
        missing = _join("anyOf", [{"properties": {name: False}} for name in value])
        return _join("allOf", [{"type": "object"}, missing])
    if keyword in ("anyOf", "allOf") and isinstance(value, list):
        parts = [negate(part) for part in value]
        return _join("allOf" if keyword == "anyOf" else "anyOf", parts)
    return None


def _join(keyword: str, parts: Sequence[Schema | None]) -> Schema | None:
    """None if there is no part, or if one is None."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    return known[0] if len(known) == 1 else {keyword: known}


def _are_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(name, str) for name in value)


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
    """int32 is OpenAPI's. Its int64, float and double hold for every number that is written."""
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
    """What must hold if an object has a property: it has others, or a schema holds."""
    found = schema.get(keyword)
    if not isinstance(found, dict):
        return
    wanted = {name: [value] if isinstance(value, str) else value for name, value in found.items()}
    if not all(isinstance(value, dict) or value == [] or _are_names(value) for value in wanted.values()):
        return
    del schema[keyword]
    for name, value in wanted.items():
        if value:
            holds = value if isinstance(value, dict) else {"required": value}
            add_part(schema, {"anyOf": [{"properties": {name: False}}, holds]})


def _rewrite_not(schema: Schema) -> None:
    negated = negate(schema.get("not"))
    if negated is None and not _allows_numbers(schema):
        negated = negate(_replace_integers(schema.get("not")))
    if negated is not None:
        del schema["not"]
        add_part(schema, negated)


def _allows_numbers(schema: Schema) -> bool:
    types = schema.get("type", "number")
    return "number" in types if isinstance(types, list) else types == "number"


def _replace_integers(schema: object) -> object:
    """What excludes the same values beside a type that has no numbers, or integers only."""
    if not isinstance(schema, dict) or "type" not in schema:
        return schema
    named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": ["number" if name == "integer" else name for name in named]}


def _rewrite_one_of(schema: Schema, disjoint: DisjointSchemas) -> None:
    """Ways that exclude each other, and properties of which exactly one may be there."""
    found = schema.get("oneOf")
    if not isinstance(found, list) or not 1 < len(found) <= _MAX_WAYS:
        return
    if all(disjoint.check(one, other) for one, other in combinations(found, 2)):
        del schema["oneOf"]
        add_part(schema, {"anyOf": found})
        return
    if not all(isinstance(way, dict) and set(way) - ANNOTATIONS == {"required"} for way in found):
        return
    negated = [negate(way) for way in found]
    if None in negated:
        return
    ways = []
    for index, way in enumerate(found):
        others = [other for number, other in enumerate(negated) if number != index]
        ways.append({"allOf": [{"required": way["required"]}, *others]})
    del schema["oneOf"]
    add_part(schema, {"anyOf": ways})


def _rewrite_min_properties(schema: Schema) -> None:
    """At least one property, which may be a named one or another."""
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
    """Put keywords side by side. llguidance reads those before and after anyOf, enum and so on by themselves."""
    if "patternProperties" in schema and "additionalProperties" in schema:
        names = ("properties", "patternProperties", "additionalProperties")
        joined = {name: schema.pop(name) for name in names if name in schema}
        schema.update(joined | {name: schema.pop(name) for name in list(schema)})
