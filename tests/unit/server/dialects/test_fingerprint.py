"""The dialect is recognised by the chat template, and parsed messages render as they were written."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.server.dialects.fingerprint import TOOLS, SentinelCall, build_message, find_dialect, find_header
from serve_llm.server.dialects.selfcheck import check_dialect
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.dialects.tool import Tool
from serve_llm.server.dialects.turn import parse_turn
from serve_llm.server.prompt.template import ChatTemplate
from support.chat_templates import TEMPLATES

TYPED = Tool(
    TOOLS[0].name,
    "",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "note": {"type": ["string", "null"]},
            "whole": {"type": "integer"},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "items": {"type": "array"},
            "inner": {"type": "object"},
        },
    },
)
TEXT = st.text("ab 1\n\t\"'\\\u00e9{}[](),:=", min_size=1).map(str.strip).filter(bool)

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXT,
        "note": st.none() | st.just("nullable"),
        "whole": st.integers(),
        "ratio": FLOATS,
        "flag": st.booleans(),
        "items": st.lists(JSON, max_size=3),
        "inner": st.dictionaries(TEXT, JSON, max_size=3),
    },
)


@functools.cache
def make(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name].write(), {})


def test_every_built_in_dialect_has_a_template() -> None:
    assert list(TEMPLATES) == list(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_dialect_is_found_by_its_template(name: str) -> None:
    template = make(name)
    found = find_dialect(template, ())
    assert found is not None and found.name == name
    assert found == BUILT_IN[name]
    assert check_dialect(found, template) == "check passed"
    assert find_header(template) == TEMPLATES[name].header.strip()


@pytest.mark.parametrize("name", BUILT_IN)
@given(content=TEXT, reasoning=TEXT, values=st.lists(TEXT, min_size=1, max_size=3), number=st.integers())
@settings(max_examples=10)
def test_what_is_read_is_rendered_as_it_was(
    name: str, content: str, reasoning: str, values: list[str], number: int
) -> None:
    dialect = BUILT_IN[name]
    template = make(name)
    assert dialect.calls is not None
    if "calls | length > 1" in template.tool_source or "calls[0]" in template.tool_source:  # it takes only one call
        values = values[:1]
    id_form = "functions.first_sentinel:{}" if dialect.calls.id_rule == "kimi" else "call0000{}"
    calls = [
        SentinelCall(id_form.format(index), TOOLS[0].name, {"first_key": value, "second_key": number})
        for index, value in enumerate(values)
    ]
    if "not calls" in template.tool_source:  # it drops the content of messages with calls
        content = ""
    question = {"role": "user", "content": "?"}
    prompt = template.render([question])
    message = build_message(content, reasoning if dialect.reasoning else None, calls)
    rendered = template.render([question, message], add_generation_prompt=False)
    turn = parse_turn(dialect, TOOLS, rendered.removeprefix(prompt).removesuffix(TEMPLATES[name].end))
    assert [call.read_arguments() for call in turn.calls] == [call.arguments for call in calls]
    assert turn.content == content
    assert turn.reasoning == (reasoning if dialect.reasoning else "")
    read = [SentinelCall(call.id, call.name, call.read_arguments()) for call in turn.calls]
    again = template.render([question, build_message(turn.content, turn.reasoning, read)], add_generation_prompt=False)
    assert again == rendered


@pytest.mark.parametrize("name", BUILT_IN)
@given(arguments=ARGUMENTS)
@settings(max_examples=15)
def test_arguments_of_every_type_are_rendered_as_they_were(name: str, arguments: dict[str, object]) -> None:
    template = make(name)
    call_id = "functions.first_sentinel:0" if name == "kimi_k2" else "call00000"
    question = {"role": "user", "content": "?"}
    prompt = template.render([question])
    message = build_message("", None, [SentinelCall(call_id, TYPED.name, arguments)])
    rendered = template.render([question, message], add_generation_prompt=False)
    turn = parse_turn(BUILT_IN[name], [TYPED], rendered.removeprefix(prompt).removesuffix(TEMPLATES[name].end))
    assert [call.read_arguments() for call in turn.calls] == [arguments]
    read = [SentinelCall(call_id, TYPED.name, call.read_arguments()) for call in turn.calls]
    again = template.render([question, build_message("", None, read)], add_generation_prompt=False)
    assert again == rendered
