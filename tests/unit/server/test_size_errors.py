"""Which keyword an error about the size of a schema names."""

from __future__ import annotations

import pytest

from serve_llm.server.structured_output.size_errors import blame_largest

DEEP: dict[str, object] = {}
for _ in range(3000):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("schema", "pointer", "keyword"),
    [
        ({}, "", None),
        (True, "", None),
        ({"enum": [1, 2, 3], "title": "x"}, "", "enum"),
        ({"type": "object", "properties": {"a": {"enum": [1] * 50}, "b": {}}}, "/properties/a", "enum"),
        ({"properties": {name: {"type": "string", "minLength": 1} for name in "abcdef"}}, "", "properties"),
        ({"anyOf": [{"const": 1}, {"oneOf": [{"const": number} for number in range(9)]}]}, "/anyOf/1", "oneOf"),
        (DEEP, "/items" * 2999, "items"),
    ],
)
def test_the_keyword_with_most_of_the_schema(schema: object, pointer: str, keyword: str | None) -> None:
    error = blame_largest(schema, "too large")
    assert (error.message, error.pointer, error.keyword) == ("too large", pointer, keyword)
