"""Invariants of the streaming parser, for every built-in dialect."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from serve_llm.server.dialects.dialect import Dialect
from serve_llm.server.dialects.table import BUILT_IN
from support.dialects import FEW_DIALECTS, Arguments, Turn, create_parser, parse, write_turn
from support.matrix import mostly_slow

CALLING = [dialect for dialect in BUILT_IN.values() if dialect.calls is not None]
FEW = [BUILT_IN[name] for name in FEW_DIALECTS]
CALLS: list[tuple[str, Arguments]] = [
    ("get_weather", {"city": "Paris, 5e", "days": 3, "tags": ["a", "b c"], "limits": {"low": -1.5}, "detailed": True}),
    ("now", {}),
    ("get_weather", {"city": "Zürich\nzwei", "unit": None}),
]

dialects = st.sampled_from(list(BUILT_IN.values()))
calling_dialects = st.sampled_from(CALLING)
plain_text = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20)
words = st.text("abc é\n\"'\\{}[]:,;=😀", max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.from_regex("[a-z]{1,4}", fullmatch=True), inner),
    max_leaves=6,
)
weather_arguments = st.fixed_dictionaries(
    {"city": words},
    optional={
        "days": st.integers(-(10**9), 10**9),
        "detailed": st.booleans(),
        "limits": st.dictionaries(st.from_regex("[a-z]{1,4}", fullmatch=True), json_values, max_size=3),
        "tags": st.lists(words, max_size=3),
    },
)
calls_of_turn = st.lists(
    st.tuples(st.just("get_weather"), weather_arguments) | st.tuples(st.just("now"), st.just({})), max_size=3
)


def split(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def list_fragments(dialect: Dialect) -> list[str]:
    """Return delimiters, halves of delimiters and other text."""
    found = sorted({form for form in dialect.list_delimiters() if form})
    halves = [form[: len(form) // 2] for form in found]
    turn = write_turn(dialect, calls=CALLS[:1])
    return [
        *found,
        *halves,
        turn,
        turn[: len(turn) // 2],
        " ",
        "\n",
        "text",
        '{"name": "now"',
        "now",
        "{",
        "}",
        "[",
        ")",
    ]


def check_calls(turn: Turn) -> None:
    for call in turn.calls:
        assert call.name
        if call.has_ended:
            assert isinstance(json.loads(call.arguments), dict)
    assert len({call.id for call in turn.calls}) == len(turn.calls)


@pytest.mark.parametrize("dialect", CALLING, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7])
def test_what_a_model_writes_is_read_in_any_pieces(dialect: Dialect, size: int) -> None:
    content = "" if dialect.calls is not None and dialect.calls.is_bare else "Let me\n\nsee <b>."
    reasoning = "First\n\nI <i>think</i>." if dialect.reasoning is not None else ""
    text = write_turn(dialect, reasoning=reasoning, content=content, calls=CALLS)
    texts = [text] if not size else [text[start : start + size] for start in range(0, len(text), size)]
    turn = parse(dialect, *texts)
    assert (turn.reasoning, turn.content) == (reasoning, content)
    assert turn.decode_calls() == CALLS
    check_calls(turn)


@settings(max_examples=300)
@given(dialects, st.data())
def test_any_split_gives_what_the_whole_gives(dialect: Dialect, data: st.DataObject) -> None:
    fragments = list_fragments(dialect)
    text = "".join(data.draw(st.lists(st.sampled_from(fragments) | plain_text, max_size=8)))
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=12))
    options = {"in_reasoning": data.draw(st.booleans()), "parse_calls": data.draw(st.booleans())}
    whole = parse(dialect, text, **options)
    assert parse(dialect, *split(text, cuts), **options) == whole
    assert parse(dialect, *text, **options) == whole
    check_calls(whole)


@settings(max_examples=200)
@given(dialect=dialects, text=st.text(st.characters(codec="utf-8"), max_size=40) | words)
def test_text_that_fits_nothing_is_content(dialect: Dialect, text: str) -> None:
    assume(not any(form in text for form in dialect.list_delimiters() if form))
    turn = parse(dialect, text)
    assert (turn.content, turn.reasoning, turn.calls) == (text, "", [])


@settings(max_examples=200)
@given(dialects, st.data())
def test_what_ends_a_turn_is_content_where_it_is_spelled(dialect: Dialect, data: st.DataObject) -> None:
    ends = dialect.list_pure_ends()
    inner = {form for form in dialect.list_delimiters() if form} - set(ends)
    text = "".join(data.draw(st.lists(st.sampled_from([*ends, "<", "<s>", " ", "\n"]) | words, max_size=6)))
    assume(not any(form in text for form in inner))
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=6))
    assert parse(dialect, *split(text, cuts), spelled_ends=()) == Turn(content=text)
    followed = text + "."
    assert parse(dialect, *split(followed, cuts)) == Turn(content=followed)
    for end in ends:
        assert parse(dialect, *split(followed + end, cuts)) == Turn(content=followed)


@settings(max_examples=200)
@given(calling_dialects, st.data())
def test_content_with_a_form_holds_what_reads_like_delimiters(dialect: Dialect, data: st.DataObject) -> None:
    fragments = data.draw(st.lists(st.sampled_from(list_fragments(dialect)) | words, max_size=6))
    content = json.dumps({"t": "".join(fragments)}, ensure_ascii=False)
    reasoning = data.draw(st.sampled_from(["", "So."])) if dialect.reasoning is not None else ""
    cuts = data.draw(st.lists(st.integers(0, 1000), max_size=6))
    text = write_turn(dialect, reasoning=reasoning, content=content)
    assert parse(dialect, *split(text, cuts), content_has_form=True) == Turn(reasoning, content)
    called = parse(dialect, *split(write_turn(dialect, reasoning=reasoning, calls=CALLS), cuts), content_has_form=True)
    assert (called.reasoning, called.content, called.decode_calls()) == (reasoning, "", CALLS)


@settings(max_examples=200)
@given(calling_dialects, st.data())
def test_what_a_call_of_nothing_looks_like_is_content(dialect: Dialect, data: st.DataObject) -> None:
    """Delimiters of calls that enclose no call are content too, byte for byte."""
    assert dialect.calls is not None
    delimiters = [form for form in dialect.calls.list_delimiters() if form]
    if dialect.reasoning is not None or dialect.content is not None or dialect.ends:
        dialect = Dialect(name=dialect.name, calls=dialect.calls)
    text = "".join(data.draw(st.lists(st.sampled_from([*delimiters, " ", "x ", "\n"]), max_size=6)))
    turn = parse(dialect, text, tools=())
    if not turn.calls:
        assert turn.content == text


@settings(max_examples=200)
@given(dialect=calling_dialects, calls=calls_of_turn, cuts=st.lists(st.integers(0, 1000), max_size=6))
def test_arguments_survive(dialect: Dialect, calls: list[tuple[str, Arguments]], cuts: list[int]) -> None:
    text = write_turn(dialect, calls=calls)
    turn = parse(dialect, *split(text, cuts))
    assert turn.decode_calls() == calls
    assert not turn.content


@pytest.mark.parametrize("dialect", mostly_slow(CALLING, FEW), ids=lambda dialect: dialect.name)
def test_a_turn_that_is_cut_keeps_what_was_written(dialect: Dialect) -> None:
    text = write_turn(dialect, calls=CALLS)
    whole = parse(dialect, text)
    for end in range(len(text)):
        cut = parse(dialect, text[:end])
        assert len(cut.calls) <= len(CALLS)
        for call, full in zip(cut.calls, whole.calls, strict=False):
            assert call.name == full.name
            assert full.arguments.startswith(call.arguments) or not call.has_ended
            assert not call.has_ended or call.arguments == full.arguments
        assert text[:end].endswith(cut.content), "the beginning of a call, at most"


@pytest.mark.parametrize("dialect", CALLING, ids=lambda dialect: dialect.name)
def test_arguments_leave_as_they_are_written(dialect: Dialect) -> None:
    city = "Llanfair" * 8
    text = write_turn(dialect, calls=[("get_weather", {"city": city})])
    parser = create_parser(dialect)
    turn = Turn()
    latest = 0
    for position, char in enumerate(text):
        turn.add(parser.push(char))
        behind = len(text[: position + 1]) - text.find(city) if position >= text.find(city) else 0
        if 0 < behind <= len(city):
            latest = max(latest, behind - (len(turn.calls[0].arguments) - turn.calls[0].arguments.find(city[:8])))
    assert latest <= 1, "the parser holds back more of a string than it has to"
    assert turn.calls[0].arguments.find(city) >= 0


@pytest.mark.parametrize("dialect", mostly_slow(CALLING, FEW), ids=lambda dialect: dialect.name)
def test_a_closing_delimiter_that_is_cut_is_no_content(dialect: Dialect) -> None:
    text = write_turn(dialect, calls=CALLS[:1])
    has_ended = False
    for end in range(len(text)):
        cut = parse(dialect, text[:end])
        assert parse(dialect, *text[:end]) == cut
        has_ended |= any(call.has_ended for call in cut.calls)
        assert not has_ended or not cut.content, text[:end]
