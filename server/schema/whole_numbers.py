"""Whole numbers written as 5.0: JSON has one kind of number, and libraries such as Gson write all of them as floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails


def convert_whole_floats(values: dict[str, Any], problems: Sequence[ErrorDetails]) -> bool:
    """Turn floats such as 5.0 into ints where pydantic demanded an int, in place. Returns whether there were any.

    values: the validated fields. Numbers elsewhere, such as those in schemas, stay as they are.
    """
    has_changed = False
    for problem in problems:
        if problem["type"] == "int_type" and _is_whole(problem["input"]):
            has_changed |= _convert(values, problem["loc"])
    return has_changed


def _convert(values: dict[str, Any], location: tuple[Any, ...]) -> bool:
    """Convert the number at a location and, in a list, all numbers of the outermost list. pydantic names the types that
    it tried in a location; such parts lead nowhere."""
    node: Any = values
    steps: list[tuple[Any, Any]] = []  # containers and keys or indices
    for part in location:
        is_step = isinstance(part, int) if isinstance(node, list) else isinstance(node, dict) and part in node
        if is_step:
            steps.append((node, part))
            node = node[part]
    if not steps or not _is_whole(node):
        return False
    while len(steps) > 1 and isinstance(steps[-1][0], list):
        steps.pop()
    parent, key = steps[-1]
    parent[key] = _convert_all(parent[key])
    return True


def _convert_all(content: Any) -> Any:
    if isinstance(content, list):
        return [_convert_all(item) for item in content]
    return int(content) if _is_whole(content) else content


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()
