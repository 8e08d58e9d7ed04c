"""Unknown fields inside known ones, which have no effect where another API is translated."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def find_nested_unknown(parsed: BaseModel, values: dict[str, Any], prefix: str = "") -> list[str]:
    """Find the places of fields with a value, inside known ones, that `parsed` has not taken from `values`."""
    found = []
    for name, field in type(parsed).model_fields.items():
        child = getattr(parsed, name)
        value = values.get(field.alias or name)
        pairs = [(f"{prefix}{name}", child, value)]
        if isinstance(child, list) and isinstance(value, list):
            pairs = [(f"{prefix}{name}[{index}]", *pair) for index, pair in enumerate(zip(child, value, strict=False))]
        for place, one, raw in pairs:
            if not isinstance(one, BaseModel) or not isinstance(raw, dict):
                continue
            names = {field.alias or name for name, field in type(one).model_fields.items()}
            found += [f"{place}.{name}" for name, item in raw.items() if name not in names and item is not None]
            found += find_nested_unknown(one, raw, f"{place}.")
    return found


def join_ignored(ignored: list[str], skipped: list[str]) -> list[str]:
    """Join the names of fields without effect. Those inside something that is skipped as a whole are omitted."""
    places = set(skipped)
    return [name for name in ignored if places.isdisjoint(_list_parents(name))] + skipped


def _list_parents(name: str) -> list[str]:
    parts = name.split(".", 4)  # no known field is nested deeper
    return [".".join(parts[:length]) for length in range(1, len(parts))]
