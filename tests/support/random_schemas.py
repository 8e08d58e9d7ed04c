"""Random JSON schemas with valid and invalid values. They only use keywords that a grammar enforces exactly."""

from __future__ import annotations

import random
import string

Schema = dict[str, object]

NAMES = ("id", "name", "kind", "tags", "count", "a b", "größe", 'quo"te', "x/y", "next")
PATTERNS = {
    "^[A-Z]{2,3}$": ("AB", "XYZ"),
    "^v[0-9]+$": ("v1", "v907"),
    "[aeiou]": ("tea", "o"),
    "^(on|off)?$": ("", "on"),
}
MAX_DEPTH = 3


def build_schema(chooser: random.Random, depth: int = 0) -> Schema:
    builders = [_build_integer, _build_number, _build_string, _build_enum, _build_scalar, _build_pattern]
    if depth < MAX_DEPTH:
        builders += [_build_object, _build_object, _build_array, _build_tuple, _build_any_of, _build_one_of]
    if depth == 0:
        builders = [_build_object]
    return chooser.choice(builders)(chooser, depth)


def build_value(chooser: random.Random, schema: Schema) -> object:
    """Return a valid value, with properties in schema order."""
    if "enum" in schema:
        return chooser.choice(schema["enum"])  # type: ignore[arg-type]
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            return build_value(chooser, chooser.choice(schema[keyword]))  # type: ignore[arg-type]
    if "pattern" in schema:
        return chooser.choice(PATTERNS[str(schema["pattern"])])
    builders = {
        "integer": lambda: chooser.randint(schema["minimum"], schema["maximum"]) * schema.get("multipleOf", 1),  # type: ignore
        "number": lambda: round(chooser.uniform(schema["minimum"], schema["maximum"]), 3),  # type: ignore[arg-type]
        "boolean": lambda: chooser.random() < 0.5,
        "null": lambda: None,
        "string": lambda: _build_text(chooser, schema),
        "array": lambda: _build_list(chooser, schema),
        "object": lambda: _build_properties(chooser, schema),
    }
    return builders[str(schema["type"])]()


def change_value(chooser: random.Random, value: object) -> object:
    """Return the value with one change somewhere, after which it may still be valid."""
    if isinstance(value, dict) and value and chooser.random() < 0.8:
        copy = dict(value)
        name = chooser.choice(list(copy))
        action = chooser.randrange(4)
        if action == 0:
            del copy[name]
        elif action == 1:
            copy["added"] = chooser.choice([1, "x", None])
        else:
            copy[name] = change_value(chooser, copy[name])
        return copy
    if isinstance(value, list) and value and chooser.random() < 0.8:
        index = chooser.randrange(len(value))
        action = chooser.randrange(3)
        if action == 0:
            return value[:index] + value[index + 1 :]
        if action == 1:
            return [*value, value[index]]
        return [*value[:index], change_value(chooser, value[index]), *value[index + 1 :]]
    if isinstance(value, str) and chooser.random() < 0.5:
        return value + chooser.choice(["", "a", "é", "00"])
    if isinstance(value, int | float) and not isinstance(value, bool) and chooser.random() < 0.7:
        return value + chooser.choice([1, -1, 0.5, 1000])
    return chooser.choice([None, True, False, 0, -1, 2.5, "", "x", [], {}])


def _build_integer(chooser: random.Random, depth: int) -> Schema:
    low = chooser.randint(-200, 100)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + chooser.randint(0, 3000)}
    if chooser.random() < 0.2:
        return {"type": "integer", "minimum": 0, "maximum": 9, "multipleOf": 1}
    return schema


def _build_number(chooser: random.Random, depth: int) -> Schema:
    low = round(chooser.uniform(-50, 50), 2)
    return {"type": "number", "minimum": low, "maximum": round(low + chooser.uniform(0.1, 90), 2)}


def _build_string(chooser: random.Random, depth: int) -> Schema:
    low = chooser.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + chooser.randint(0, 6)}


def _build_pattern(chooser: random.Random, depth: int) -> Schema:
    return {"type": "string", "pattern": chooser.choice(list(PATTERNS))}


def _build_enum(chooser: random.Random, depth: int) -> Schema:
    return {"enum": chooser.sample(["red", "green", 1, 2, None, True, [1, 2], {"k": "v"}, "", "a\nb"], 3)}


def _build_scalar(chooser: random.Random, depth: int) -> Schema:
    return {"type": chooser.choice(["boolean", "null"])}


def _build_object(chooser: random.Random, depth: int) -> Schema:
    names = chooser.sample(NAMES, chooser.randint(1, 4))
    schema: Schema = {
        "type": "object",
        "properties": {name: build_schema(chooser, depth + 1) for name in names},
        "required": [name for name in names if chooser.random() < 0.6],
    }
    extra = chooser.randrange(3)
    if extra == 0:
        schema["additionalProperties"] = False
    elif extra == 1:
        schema["additionalProperties"] = {"type": "integer"}
    return schema


def _build_array(chooser: random.Random, depth: int) -> Schema:
    low = chooser.randint(0, 2)
    items = build_schema(chooser, depth + 1)
    return {"type": "array", "items": items, "minItems": low, "maxItems": low + chooser.randint(0, 3)}


def _build_tuple(chooser: random.Random, depth: int) -> Schema:
    items = [build_schema(chooser, depth + 1) for _ in range(2)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}


def _build_any_of(chooser: random.Random, depth: int) -> Schema:
    return {"anyOf": [build_schema(chooser, depth + 1) for _ in range(2)]}


def _build_one_of(chooser: random.Random, depth: int) -> Schema:
    return {"oneOf": [{"type": "null"}, _build_string(chooser, depth), _build_integer(chooser, depth)]}


def _build_text(chooser: random.Random, schema: Schema) -> str:
    length = chooser.randint(schema["minLength"], schema["maxLength"])  # type: ignore[arg-type]
    return "".join(chooser.choices(string.ascii_letters + ' é\n"\\\U0001f600', k=length))


def _build_list(chooser: random.Random, schema: Schema) -> list[object]:
    if "prefixItems" in schema:
        return [build_value(chooser, item) for item in schema["prefixItems"]]  # type: ignore[attr-defined]
    number = chooser.randint(schema["minItems"], schema["maxItems"])  # type: ignore[arg-type]
    return [build_value(chooser, schema["items"]) for _ in range(number)]  # type: ignore[arg-type]


def _build_properties(chooser: random.Random, schema: Schema) -> dict[str, object]:
    required = schema["required"]
    return {
        name: build_value(chooser, child)
        for name, child in schema["properties"].items()  # type: ignore[attr-defined]
        if name in required or chooser.random() < 0.5  # type: ignore[operator]
    }
