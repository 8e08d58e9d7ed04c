"""How deep values nest. JSON and YAML of thousands of levels would exceed Python's limit on recursion."""

from __future__ import annotations

import json
from collections.abc import Mapping

_MAX_DEPTH = 64  # levels of an option's value
TOO_DEEP = f"expected at most {_MAX_DEPTH} levels of objects and lists"


def nests_deeper(content: object, max_depth: int) -> bool:
    """Whether objects and lists nest more than `max_depth` levels, `content` included."""
    level = [content] if isinstance(content, Mapping | list | tuple) else []
    for _ in range(max_depth):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, Mapping) else node)
            if isinstance(child, Mapping | list | tuple)
        ]
        if not level:
            return False
    return bool(level)


def check_nesting(value: object) -> None:
    """Raises ValueError if an option's value nests too deep."""
    if nests_deeper(value, _MAX_DEPTH):
        raise ValueError(TOO_DEEP)


def parse_option_json(text: str) -> object:
    """Read the JSON text of an option's value. Raises ValueError."""
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    check_nesting(value)
    return value
