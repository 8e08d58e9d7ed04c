"""Requests may set expressions for the whitespace and separators of JSON: the output is still JSON."""

from __future__ import annotations

import pytest

from serve_llm.server.http.errors import InvalidRequest
from support.grammars import accepts, compile_grammar


@pytest.mark.parametrize(
    ("wanted", "what"),
    [
        ({"whitespace_pattern": "x*", "json": {}}, "nothing but spaces, tabs and line breaks"),
        ({"whitespace_pattern": r" |\S", "json_object": True}, "nothing but spaces"),
        ({"json": {"x-guidance": {"key_separator": "="}}}, "key_separator may match nothing but a colon"),
        ({"json": {"x-guidance": {"item_separator": ",?"}}}, "item_separator may match nothing but a comma"),
        ({"json": {"x-guidance": {"item_separator": ""}}}, "item_separator may match nothing but a comma"),
        ({"json": {"x-guidance": {"whitespace_pattern": "/"}}}, "whitespace_pattern may match nothing but"),
    ],
    ids=str,
)
def test_what_allows_other_texts_is_refused(wanted: dict[str, object], what: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_grammar(**wanted)
    assert caught.value.param == f"structured_outputs.{next(iter(wanted))}"
    assert what in caught.value.message


def test_whitespace_in_own_patterns_is_that_of_json() -> None:
    own = {"x-guidance": {"whitespace_flexible": False, "key_separator": r"\s?:[\s]?", "item_separator": r"\s*,"}}
    grammars = [
        compile_grammar(json={}, whitespace_pattern=r"\s*"),
        compile_grammar(json={}, whitespace_pattern=r"[\s\n]*"),
        compile_grammar(json=own),
    ]
    for grammar in grammars:
        assert accepts(grammar, '{"a"\t:\n1 \r,"b":2}')
        assert not accepts(grammar, '{"a":\u00a01}') and not accepts(grammar, '{"a"\x0b:1}')
