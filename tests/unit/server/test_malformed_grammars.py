"""Custom tools with malformed grammars: which component reports it, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.structured_output.pattern import closes_unopened_group
from support.serving import Served
from support.tools import with_tools

CASES = [
    ("lark", "start: a", "a is not defined"),
    ("lark", "", "start is not defined"),
    ("lark", 'start: "a', "is not Lark"),
    ("lark", 'start: "a" start', "recursive without end"),
    ("lark", 'start: a\n%ignore " "', "a is not defined"),
    ("lark", "start: /(/", "unclosed group"),
    ("lark", "start: /a)(b/", "does not open"),
    ("regex", "(", "unclosed group"),
    ("regex", "a)|(b", "does not open"),
]


@pytest.fixture
def served(serve: Callable[..., Served], model: ServedModel) -> Served:
    return serve("Hello.<|end|>", served_model=with_tools(model), model_info=None)


@pytest.mark.parametrize(("syntax", "definition", "problem"), CASES)
def test_malformed_grammars_are_refused(served: Served, syntax: str, definition: str, problem: str) -> None:
    grammar = {"syntax": syntax, "definition": definition}
    flat = {"type": "custom", "name": "patch", "format": {"type": "grammar", **grammar}}
    nested = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}}
    replies = [
        (served.post("/v1/responses", {"input": "Hi", "tools": [flat]}), "tools[0].format"),
        (served.chat(tools=[nested]), "tools[0].custom.format"),
    ]
    for reply, param in replies:
        error: Any = reply.json()["error"]
        assert reply.status == 400 and problem in error["message"], reply.content
        assert error["param"].startswith(param) and error["message"].startswith(param)


@pytest.mark.parametrize(
    ("pattern", "closes"),
    [
        (")", True),
        ("a)(b", True),
        (r"(a)\)", False),
        ("[)](a)", False),
        (r"[\])]", False),
        ("(a))", True),
        ("(", False),
    ],
)
def test_groups_that_are_not_open(pattern: str, closes: bool) -> None:
    assert closes_unopened_group(pattern) is closes
