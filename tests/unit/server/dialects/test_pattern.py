"""Regular expressions and the texts that they match."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.server.dialects.dialect import DialectError
from serve_llm.server.dialects.pattern import NamedGroup, read_pattern
from serve_llm.server.dialects.response_template import read_response_template

READ = [
    ("<tool_call>", [("<tool_call>",)]),
    (r"<\|im_end\|>\s*", [("<|im_end|>",)]),
    (r"<a>\s*<b>", [("<a>\n<b>",)]),
    (r'"name":\s*"', [('"name": "',)]),
    (r"\n+", [("\n",)]),
    (r"<a>\s+", [("<a>\n",)]),
    (r"<a>\s{0,2}+", [("<a>",)]),
    ("<a>\n{}", [("<a>\n{}",)]),
    (r"(?:^|<think>\s*)", [(), ("<think>",)]),
    (r"</a>|</b>$", [("</a>",), ("</b>",)]),
    (r"(?:<x>)?<y>", [("<x><y>",), ("<y>",)]),
    (r"<f=(?P<name>[^)>\n]+)>", [("<f=", NamedGroup("name"), ">")]),
    (r"<(?P<key>(?:a|\))+)>(?P<value>.*?)</>", [("<", NamedGroup("key"), ">", NamedGroup("value"), "</>")]),
]


@pytest.mark.parametrize(("pattern", "forms"), READ)
def test_delimiters_are_read(pattern: str, forms: list[tuple[str, ...]]) -> None:
    assert read_pattern(pattern) == forms


@pytest.mark.parametrize(
    "pattern",
    ["<.*>", "[ab]", r"\w", "a+", "(?=a)", "(?:a", "a)", "(?P<a>b", "(?:a|b)" * 8, "(" * 5000 + ")" * 5000, "a{3}"],
)
def test_what_is_more_than_a_delimiter_is_refused(pattern: str) -> None:
    with pytest.raises(DialectError):
        read_pattern(pattern)


@given(st.lists(st.sampled_from([*"ab<>|?*+(){}[]\\/\n", r"\s*", r"\|", "(?:", "(?P<n>"]), max_size=12).map("".join))
def test_a_text_that_is_read_matches_its_pattern(pattern: str) -> None:
    try:
        with warnings.catch_warnings(action="ignore"):
            compiled = re.compile(pattern, re.DOTALL)
    except re.error:
        compiled = None
    try:
        forms = read_pattern(pattern)
    except DialectError:
        return
    for form in forms:
        if compiled is not None and not any(isinstance(part, NamedGroup) for part in form):
            assert compiled.search("".join(form)) is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("a<>(|?{}\\", max_size=8) | st.just("{name}"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["open", "close", "open_pattern", "content", "transform", "function", "content_args"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["thinking", "content", "tool_calls"]), JSON))
def test_a_hostile_response_template_is_read_or_refused(fields: dict[str, object]) -> None:
    try:
        read_response_template({"fields": fields, "start_anchor": "<a>"})
    except DialectError:
        pass
