"""The grammar of a turn: what it leaves free, what it enforces, and that the parser agrees with it."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from serve_llm.server.dialects.dialect import Dialect, JsonCodec, get_written_form
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.dialects.tool import Tool, ToolChoice
from serve_llm.server.structured_output.errors import GrammarError
from support.dialects import TOOLS, Arguments, parse
from support.dialects import write_turn as write_text
from support.grammars import compile_grammar
from support.turn_grammars import TurnTokenizer, accepts, get_tokenizer, list_allowed, walk, write_turn

CALLING = [dialect for dialect in BUILT_IN.values() if dialect.calls is not None]
SAMPLE = ["hermes", "qwen3_5", "llama3", "llama3_pythonic", "mistral_ids", "glm4_7", "harmony", "command", "gemma4"]
SAMPLED = [BUILT_IN[name] for name in SAMPLE]
CASES = [pytest.param(dialect, True, id=dialect.name) for dialect in CALLING]
CASES += [
    pytest.param(dialect, False, id=f"{dialect.name}-text")
    for dialect in [*SAMPLED, BUILT_IN["deepseek_v3"]]
    if not dialect.start  # without its tokens, the messages of a turn cannot be told apart
]
WALKED = [
    case if case.id in SAMPLE else pytest.param(*case.values, id=case.id, marks=pytest.mark.slow) for case in CASES
]
AUTO = ToolChoice("auto")
REQUIRED = ToolChoice("required")
LOOSE: list[tuple[str, Arguments]] = [("get_weather", {"city": "Zürich", "days": 3}), ("now", {})]
BOUND = Tool(
    "get_weather",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "detailed": {"type": "boolean"},
            "note": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
            "limits": {"$ref": "#/$defs/Limits"},
        },
        "required": ["city", "days", "limits"],
        "additionalProperties": False,
        "$defs": {
            "Limits": {
                "type": "object",
                "properties": {"low": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["low"],
                "additionalProperties": False,
            }
        },
    },
    strict=True,
)
STRICT = (BOUND, Tool("now", "", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True))
VALID: Arguments = {"city": "Paris", "days": 3, "limits": {"low": 1}}
CONTENT_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
CONTENT = json.dumps({"grammars": [{"json_schema": CONTENT_SCHEMA}]})


def write_answer(dialect: Dialect, content: str) -> str:
    """Return a turn with content. If possible, the delimiter that ends the content is the end of the turn."""
    text = write_text(dialect, content=content)
    for end in dialect.ends:
        text = text.removesuffix(end)
    return text


def write_calls(dialect: Dialect, calls: list[tuple[str, Arguments]], **parts: str) -> str:
    if dialect.start:
        calls = calls[:1]
    text = write_text(dialect, calls=calls, **parts)
    for end in dialect.ends:
        text = text.removesuffix(end)
    return text


@pytest.mark.parametrize(("dialect", "has_tokens"), WALKED)
def test_offering_tools_changes_no_text_without_calls(dialect: Dialect, has_tokens: bool) -> None:
    tokenizer = get_tokenizer(dialect, has_tokens)
    grammar = write_turn(tokenizer, dialect, TOOLS, AUTO)
    everything = set(range(tokenizer.guide.vocab_size))
    if not has_tokens and not all(form.isascii() for form in dialect.list_delimiters()):
        return  # bytes that could form the delimiters are not free
    for text in ("", "Hello, wörld!", 'A <b> [c] {"d": 1} \n\n', "a\ufffd<|user|>b", '{"name": "Bob"}', "[1, 2]"):
        assert list_allowed(tokenizer, grammar, text) == everything, text
    chooser = random.Random(0)
    used = {token_id for form in dialect.list_delimiters() for token_id in tokenizer.encode(form) if form}
    ids = [chooser.choice(sorted(everything - used - set(tokenizer.guide.eos_tokens))) for _ in range(200)]
    assert accepts(tokenizer, grammar, ids)


@pytest.mark.parametrize(("dialect", "has_tokens"), CASES)
def test_what_a_model_writes_is_allowed(dialect: Dialect, has_tokens: bool) -> None:
    tokenizer = get_tokenizer(dialect, has_tokens)
    content = "" if dialect.calls is not None and dialect.calls.is_bare else "Let me see."
    reasoning = "I think." if dialect.reasoning is not None else ""
    text = write_calls(dialect, LOOSE, content=content, reasoning=reasoning)
    grammar = write_turn(tokenizer, dialect, TOOLS, AUTO)
    assert accepts(tokenizer, grammar, text), text
    assert accepts(tokenizer, grammar, write_answer(dialect, "No calls here."))
    if dialect.reasoning is not None:
        opening = get_written_form(dialect.reasoning.open)
        opened = write_turn(tokenizer, dialect, TOOLS, AUTO, in_reasoning=True)
        assert accepts(tokenizer, opened, text.removeprefix(opening)), text


@pytest.mark.parametrize(("dialect", "has_tokens"), CASES)
def test_a_call_that_has_begun_is_well_formed(dialect: Dialect, has_tokens: bool) -> None:
    tokenizer = get_tokenizer(dialect, has_tokens)
    grammar = write_turn(tokenizer, dialect, TOOLS, AUTO)
    text = write_calls(dialect, [("get_weather", {"city": "Paris"})])
    assert accepts(tokenizer, grammar, text)
    assert not accepts(tokenizer, grammar, text.replace("get_weather", "get_wheather")) or is_free(dialect)
    middle = text.index("Paris") - 1
    assert not accepts(tokenizer, grammar, text[: middle - 1])
    assert not accepts(tokenizer, grammar, text[: text.index("weather") + 7] + " and so on") or is_free(dialect)


def is_free(dialect: Dialect) -> bool:
    """Return whether a call of an unknown tool counts as content."""
    return dialect.calls is not None and dialect.calls.is_bare


@pytest.mark.parametrize(("dialect", "has_tokens"), CASES)
def test_a_required_call_is_made_and_valid(dialect: Dialect, has_tokens: bool) -> None:
    tokenizer = get_tokenizer(dialect, has_tokens)
    grammar = write_turn(tokenizer, dialect, STRICT, REQUIRED)
    assert dialect.calls is not None
    for reasoning in ("", "So." if dialect.reasoning is not None else ""):
        assert accepts(tokenizer, grammar, write_calls(dialect, [("get_weather", VALID)], reasoning=reasoning))
    assert not accepts(tokenizer, grammar, write_calls(dialect, [("get_weather", {**VALID, "days": 15})]))
    assert not accepts(tokenizer, grammar, write_calls(dialect, [("get_weather", {"city": "Paris"})]))
    assert not accepts(tokenizer, grammar, write_answer(dialect, "No."))


@pytest.mark.parametrize(("dialect", "has_tokens"), CASES)
def test_a_function_without_parameters_takes_no_arguments(dialect: Dialect, has_tokens: bool) -> None:
    tokenizer = get_tokenizer(dialect, has_tokens)
    call = write_calls(dialect, [("now", {})])
    other = write_calls(dialect, [("now", {"zone": "UTC"})])
    for parameters in ({}, {"type": "object", "properties": {}}, {"properties": {}, "required": [], "title": "Now"}):
        grammar = write_turn(tokenizer, dialect, [Tool("now", "", parameters)], REQUIRED)
        assert accepts(tokenizer, grammar, call) and not accepts(tokenizer, grammar, other), parameters
    for parameters in ({"type": "object"}, {"properties": {}, "additionalProperties": {"type": "string"}}):
        assert Tool("now", "", parameters).argument_schema == parameters


def check_walk(
    tokenizer: TurnTokenizer, dialect: Dialect, grammar: str, seeds: range, prefix: str = "", has_content: bool = False
) -> None:
    """Check that texts allowed by the grammar are parsed as valid calls. has_content: there may be other text too."""
    schemas = {tool.name: tool.parameters for tool in STRICT}
    num_checked = 0
    for seed in range(seeds.start, seeds.stop + 40):
        if seed >= seeds.stop and num_checked:
            break
        text = walk(tokenizer, grammar, random.Random(seed), prefix, max_tokens=250)
        if text is None:
            continue  # the text has become too long
        turn = parse(dialect, text, tools=STRICT)
        assert turn.calls and (has_content or not turn.content), text
        for name, arguments in turn.decode_calls():
            jsonschema.validate(arguments, schemas[name])
        num_checked += 1
    assert num_checked


SEEDS = [range(2), pytest.param(range(2, 4), marks=pytest.mark.slow), pytest.param(range(4, 6), marks=pytest.mark.long)]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize(("dialect", "has_tokens"), WALKED)
def test_texts_of_the_grammar_are_valid_calls(dialect: Dialect, has_tokens: bool, seeds: range) -> None:
    tokenizer = get_tokenizer(dialect, has_tokens)
    for parallel in (False, True):
        check_walk(tokenizer, dialect, write_turn(tokenizer, dialect, STRICT, REQUIRED, parallel=parallel), seeds)
    named = ToolChoice("required", ("get_weather",), is_named=True)
    check_walk(tokenizer, dialect, write_turn(tokenizer, dialect, STRICT, named), seeds)
    chosen = write_calls(dialect, [("get_weather", VALID)])
    prefix = chosen[: chosen.index("get_weather") + len("get_weather") + is_free(dialect)]
    for parallel in (False, True):
        grammar = write_turn(tokenizer, dialect, STRICT, AUTO, parallel=parallel)
        check_walk(tokenizer, dialect, grammar, seeds, prefix, has_content=True)


@pytest.mark.parametrize("dialect", SAMPLED, ids=lambda dialect: dialect.name)
def test_a_strict_tool_is_bound_where_a_call_is_a_choice(dialect: Dialect) -> None:
    tokenizer = get_tokenizer(dialect, True)
    strict = write_turn(tokenizer, dialect, STRICT, AUTO)
    assert dialect.calls is not None
    invalid = write_calls(dialect, [("get_weather", {"city": "Paris", "days": 15, "limits": {"low": 1}})])
    assert not accepts(tokenizer, strict, invalid)
    loose = write_turn(tokenizer, dialect, TOOLS, AUTO)
    assert accepts(tokenizer, loose, invalid)


@pytest.mark.parametrize("dialect", SAMPLED, ids=lambda dialect: dialect.name)
def test_the_choice_of_tools_and_of_several_calls_is_enforced(dialect: Dialect) -> None:
    tokenizer = get_tokenizer(dialect, True)
    now: list[tuple[str, Arguments]] = [("now", {})]
    twice = write_calls(dialect, now * 2)
    once = write_calls(dialect, now)
    for choice in (ToolChoice("required", ("get_weather",)), ToolChoice("auto", ("get_weather",))):
        grammar = write_turn(tokenizer, dialect, TOOLS, choice)
        assert not accepts(tokenizer, grammar, once) or (choice.mode == "auto" and is_free(dialect))
    for choice in (AUTO, REQUIRED):
        assert accepts(tokenizer, write_turn(tokenizer, dialect, TOOLS, choice), twice)
        if dialect.start:
            continue
        single = write_turn(tokenizer, dialect, TOOLS, choice, parallel=False)
        assert accepts(tokenizer, single, once) and not accepts(tokenizer, single, twice)
    named = write_turn(tokenizer, dialect, TOOLS, ToolChoice("required", ("now",), is_named=True))
    assert accepts(tokenizer, named, once)


@pytest.mark.pairs("grammar + tools")
@pytest.mark.parametrize("dialect", SAMPLED, ids=lambda dialect: dialect.name)
def test_content_has_its_form_beside_reasoning_and_calls(dialect: Dialect) -> None:
    tokenizer = get_tokenizer(dialect, True)
    grammar = write_turn(tokenizer, dialect, TOOLS, AUTO, content=CONTENT)
    assert accepts(tokenizer, grammar, write_answer(dialect, '{"a": 1}'))
    assert accepts(tokenizer, grammar, write_calls(dialect, [("now", {})]))
    assert not accepts(tokenizer, grammar, write_answer(dialect, "free"))
    assert not accepts(tokenizer, grammar, write_answer(dialect, '{"a": "b"}'))
    plain = write_turn(tokenizer, dialect, (), AUTO, content=CONTENT)
    assert not accepts(tokenizer, plain, write_calls(dialect, [("now", {})]))
    if dialect.reasoning is None:
        return
    reasoned = write_text(dialect, reasoning="Hm.", content='{"a": 1}')
    reasoned = reasoned.removesuffix("<|return|>")
    assert accepts(tokenizer, grammar, reasoned)
    opened = write_turn(tokenizer, dialect, TOOLS, AUTO, content=CONTENT, in_reasoning=True)
    assert accepts(tokenizer, opened, reasoned.removeprefix(get_written_form(dialect.reasoning.open)))
    assert not accepts(tokenizer, opened, "Hm.")


@pytest.mark.parametrize("dialect", [one for one in CALLING if one.reasoning is not None], ids=lambda one: one.name)
def test_content_under_a_grammar_may_begin_with_whitespace(dialect: Dialect) -> None:
    choices = [" yes", "\n\nno ", "maybe"]
    content = compile_grammar(choice=choices)
    tokenizer = get_tokenizer(dialect, True)
    reasoned = write_text(dialect, reasoning="Hm.")
    for tools in ((), (BOUND,)):
        grammar = write_turn(tokenizer, dialect, tools, AUTO, content=content)
        for choice in choices:
            text = write_text(dialect, reasoning="Hm.", content=choice)
            for end in dialect.ends:
                text = text.removesuffix(end)
            assert accepts(tokenizer, grammar, text), text
        for seed in range(6):
            text = walk(tokenizer, grammar, random.Random(seed), reasoned, 150) or ""
            turn = parse(dialect, text, tools=tools, content_has_form=True)
            assert bool(turn.calls) != (turn.content in choices) or not text, text


def test_nothing_is_enforced_without_tools_and_form() -> None:
    dialect = BUILT_IN["hermes"]
    tokenizer = get_tokenizer(dialect, True)
    for tools, choice in (((), AUTO), (TOOLS, ToolChoice("none"))):
        assert tokenizer.write(dialect, tools, choice) is None


def test_a_schema_that_binds_and_cannot_be_enforced_is_refused() -> None:
    parameters: dict[str, object] = {
        "type": "object",
        "properties": {"a": {"not": {"format": "date"}}},
        "required": ["a"],
    }
    for name in ("hermes", "qwen3_coder", "gemma4"):
        dialect = BUILT_IN[name]
        tokenizer = get_tokenizer(dialect, True)
        tokenizer.write(dialect, [Tool("f", "", parameters)], AUTO)
        for choice, strict in ((AUTO, True), (REQUIRED, False), (REQUIRED, True)):
            with pytest.raises(GrammarError, match=r"\(function f\)"):
                tokenizer.write(dialect, [Tool("f", "", parameters, strict)], choice)


def test_every_codec_has_its_walk() -> None:
    codecs = {type(dialect.calls.codec) for dialect in SAMPLED if dialect.calls is not None}
    assert len(codecs) == 4 and JsonCodec in codecs


LISTS: list[tuple[dict[str, object], list[str], list[str]]] = [
    ({"maxItems": 0}, [""], ["1"]),
    ({"maxItems": 1}, ["", "1"], ["1,2"]),
    ({"maxItems": 3, "minItems": 2}, ["1,2", "1,2,3"], ["", "1", "1,2,3,4"]),
    ({"minItems": 2}, ["1,2", "1,2,3,4,5"], ["", "1"]),
    ({"minItems": 2, "maxItems": 2}, ["1,2"], ["1", "1,2,3"]),
    ({"prefixItems": [{"type": "boolean"}]}, ["", "true", "true,1,2"], ["1", "true,true"]),
    ({"prefixItems": [{"type": "boolean"}] * 2, "items": False, "minItems": 1}, ["true", "true,false"], ["", "true,1"]),
    ({"prefixItems": [{"type": "boolean"}], "minItems": 2, "maxItems": 3}, ["true,1", "true,1,2"], ["true", "1,2"]),
    ({"prefixItems": [{"type": "boolean"}] * 2, "maxItems": 1}, ["", "true"], ["true,true", "1"]),
]


@pytest.mark.parametrize(("keywords", "valid", "invalid"), LISTS, ids=str)
def test_lists_of_a_codec_with_quotes_of_its_own(
    keywords: dict[str, object], valid: list[str], invalid: list[str]
) -> None:
    dialect = BUILT_IN["gemma4"]
    tokenizer = get_tokenizer(dialect, True)
    numbers = {"type": "array", "items": {"type": "integer"}, **keywords}
    tool = Tool("f", "", {"type": "object", "properties": {"a": numbers}, "required": ["a"]})
    grammar = write_turn(tokenizer, dialect, [tool], REQUIRED)
    for values, expected in ((valid, True), (invalid, False)):
        for value in values:
            assert accepts(tokenizer, grammar, f"<|tool_call>call:f{{a:[{value}]}}<tool_call|>") == expected, value


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"contains": {"type": "integer"}}, "contains"),
        ({"maxItems": 10**6}, "maxItems"),
        ({"minItems": -1}, "minItems"),
        ({"minItems": 3, "maxItems": 2}, "minItems"),
        ({"prefixItems": [{}] * 101}, "prefixItems"),
    ],
    ids=str,
)
def test_lists_that_cannot_be_enforced_are_refused_by_name(keywords: dict[str, object], named: str) -> None:
    tool = Tool("f", "", {"type": "object", "properties": {"a": {"type": "array", **keywords}}})
    with pytest.raises(GrammarError) as caught:
        get_tokenizer(BUILT_IN["gemma4"], True).write(BUILT_IN["gemma4"], [tool], REQUIRED)
    assert caught.value.keyword == named
