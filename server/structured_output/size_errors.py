"""Name the keyword to blame when a JSON schema exceeds a limit: the one that contains most of the schema."""

from __future__ import annotations

from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.schema_walk import Subschema, list_members, list_subschemas

MAIN_SHARE = 0.5  # blame a subschema instead if it holds more than this share of its parent
UNIT_CHARACTERS = 8  # this many characters of a string count as one value


def blame_largest(schema: object, message: str) -> GrammarError:
    """Return an error that names the largest part of a schema, which may nest to any depth."""
    sizes = _count_values(schema)

    def size_of(value: object) -> int:
        return sizes.get(id(value)) or _size_of_scalar(value)

    place = Subschema("", schema)
    while True:
        largest = max(list_subschemas(place), key=lambda child: size_of(child.schema), default=None)
        if largest is None or not isinstance(largest.schema, dict) or not largest.schema:
            break
        if size_of(largest.schema) <= MAIN_SHARE * size_of(place.schema):
            break
        place = largest
    keywords = place.schema if isinstance(place.schema, dict) else {}
    return GrammarError(
        message, place.pointer, max(keywords, key=lambda keyword: size_of(keywords[keyword]), default=None)
    )


def _size_of_scalar(value: object) -> int:
    return 1 + len(value) // UNIT_CHARACTERS if isinstance(value, str) else 1


def _count_values(value: object) -> dict[int, int]:
    """Return, by the id of each object and list, the number of values in it, at any depth."""
    found: list[object] = []
    stack = [value]
    while stack:
        container = stack.pop()
        found.append(container)
        stack += [member for _, member in list_members(container) if isinstance(member, dict | list)]
    sizes: dict[int, int] = {}
    for container in reversed(found):  # contents come after their container
        sizes[id(container)] = 1 + sum(
            sizes.get(id(member)) or _size_of_scalar(member) for _, member in list_members(container)
        )
    return sizes
