"""How the parser handles turns that differ from the usual form: ids, repeated keys, errors, other orders."""

from __future__ import annotations

import json
import random
import re

import pytest

from serve_llm.server.dialects.dialect import Dialect
from serve_llm.server.dialects.parser import DialectParser
from serve_llm.server.dialects.pieces import CallBegin
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.dialects.tool import ToolChoice
from support.dialects import TOOLS, Arguments, Turn, create_parser, parse, write_turn
from support.turn_grammars import accepts, get_tokenizer
from support.turn_grammars import write_turn as write_grammar

HERMES = BUILT_IN["hermes"]
QWEN3 = BUILT_IN["qwen3"]
CODER = BUILT_IN["qwen3_coder"]
HARMONY = BUILT_IN["harmony"]
NOW: list[tuple[str, Arguments]] = [("now", {})]


def list_ids(dialect: Dialect, text: str, num_previous_calls: int = 0) -> list[str]:
    parser = DialectParser(dialect, TOOLS, generator=random.Random(7), num_previous_calls=num_previous_calls)
    return [piece.id for piece in parser.push(text) + parser.finish() if isinstance(piece, CallBegin)]


def test_ids_follow_the_models_rule() -> None:
    first, second = list_ids(HERMES, write_turn(HERMES, calls=NOW * 2))
    assert first != second and re.fullmatch("call_[A-Za-z0-9]{24}", first)
    for name in ("mistral", "mistral_array"):
        ids = list_ids(BUILT_IN[name], write_turn(BUILT_IN[name], calls=NOW * 2))
        assert len(set(ids)) == 2 and all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in ids)
    written = BUILT_IN["mistral_ids"]
    assert list_ids(written, write_turn(written, calls=NOW * 2)) == ["abcdefgh0", "abcdefgh1"]
    kimi = BUILT_IN["kimi_k2"]
    text = write_turn(kimi, calls=NOW * 2)
    assert list_ids(kimi, text) == ["functions.now:0", "functions.now:1"]
    assert list_ids(kimi, text.replace("now:1", "now:0"), 4) == ["functions.now:0", "functions.now:5"]


def test_ids_follow_from_the_generator_alone() -> None:
    text = write_turn(HERMES, calls=NOW * 3)
    assert list_ids(HERMES, text) == list_ids(HERMES, text)


REPEATED = [
    (CODER, "<tool_call><function=get_weather><parameter=city>A</parameter><parameter=city>B</parameter></function>"),
    (BUILT_IN["llama3_pythonic"], "[get_weather(city='A', city='B')]"),
    (BUILT_IN["gemma4"], '<|tool_call>call:get_weather{city:<|"|>A<|"|>,city:<|"|>B<|"|>}<tool_call|>'),
]


@pytest.mark.parametrize(("dialect", "text"), REPEATED)
def test_of_repeated_keys_the_first_counts(dialect: Dialect, text: str) -> None:
    for texts in ([text], list(text)):
        turn = parse(dialect, *texts)
        assert turn.decode_calls() == [("get_weather", {"city": "A"})]
        assert turn.calls[0].arguments.count("city") == 1


OBJECTS: list[tuple[str, Arguments]] = [
    ('{"arguments": {"city": "A"}, "name": "get_weather"}', {"city": "A"}),
    ('{"type": "function", "name": "get_weather", "arguments": {"city": "A"}, "more": [1, "}"]}', {"city": "A"}),
    ('{"name": "get_weather", "arguments": "{\\"city\\": \\"A\\"}"}', {"city": "A"}),
    ('{"name": "get_weather", "arguments": null}', {}),
    ('{"name": "get_weather"}', {}),
    ('{ "name" : "get_weather" ,\n "arguments" : { "city" : "A\nB" } }', {"city": "A\nB"}),
]


@pytest.mark.parametrize(("written", "arguments"), OBJECTS)
def test_objects_may_be_written_otherwise(written: str, arguments: Arguments) -> None:
    text = f"<tool_call>{written}</tool_call>"
    for texts in ([text], list(text)):
        assert parse(HERMES, *texts).decode_calls() == [("get_weather", arguments)]


VALUES: list[tuple[str, str, object]] = [  # parameter, text, value
    ("city", "12", "12"),
    ("city", "\n  indented\n", "  indented"),
    ("days", " 12 ", 12),
    ("days", "many", "many"),
    ("detailed", "True", True),
    ("unit", "null", None),
    ("unit", "nullable", "nullable"),
    ("tags", "['a', 'b']", ["a", "b"]),
    ("limits", '{"low": 1}', {"low": 1}),
    ("unknown", "[1]", "[1]"),
]


@pytest.mark.parametrize(("key", "written", "value"), VALUES)
def test_values_between_delimiters_have_the_types_of_the_schema(key: str, written: str, value: object) -> None:
    text = f"<tool_call>\n<function=get_weather>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    if written.startswith("\n"):
        text = text.replace("\n\n  indented\n\n", "\n  indented\n")
    for texts in ([text], list(text)):
        assert parse(CODER, *texts).decode_calls() == [("get_weather", {key: value})]


JSON_VALUES: list[tuple[str, str, object]] = [  # parameter, text, value
    ("tags", '["a</parameter>b"]', ["a</parameter>b"]),
    ("tags", '["\\"</parameter>", "</parameter>"]', ['"</parameter>', "</parameter>"]),
    ("limits", ' {"</parameter>": [1]} ', {"</parameter>": [1]}),
    ("tags", "['it\"s']", ['it"s']),
    ("tags", '["cut', '["cut'),
    ("limits", '{"cut]}', '{"cut]}'),
]


@pytest.mark.parametrize(("key", "written", "value"), JSON_VALUES)
def test_a_string_in_a_value_of_json_may_hold_the_end_of_values(key: str, written: str, value: object) -> None:
    members = f"<parameter={key}>{written}</parameter><parameter=city>A</parameter>"
    text = f"<tool_call><function=get_weather>{members}</function></tool_call>"
    for texts in ([text], list(text)):
        assert parse(CODER, *texts).decode_calls() == [("get_weather", {key: value, "city": "A"})]


def test_json_may_hold_the_end_of_values_where_a_delimiter_says_that_it_is_json() -> None:
    dialect = BUILT_IN["deepseek_v3_2"]
    text = write_turn(dialect, calls=[("get_weather", {"days": 3})])
    text = text.replace(">3<", '>"</｜DSML｜parameter>"<')
    for texts in ([text], list(text)):
        assert parse(dialect, *texts).decode_calls() == [("get_weather", {"days": "</｜DSML｜parameter>"})]


def test_a_malformed_call_keeps_its_text_and_has_no_end() -> None:
    text = '<tool_call>\n{"name": "now", "arguments": {"a": 1,, }}\n</tool_call>\n' + write_turn(HERMES, calls=NOW)
    turn = parse(HERMES, text)
    assert [call.has_ended for call in turn.calls] == [False, True]
    assert turn.calls[0].arguments.startswith('{"a": 1,, }')
    assert parse(HERMES, *text) == turn


def test_a_value_of_python_that_is_none_keeps_its_text() -> None:
    turn = parse(BUILT_IN["llama3_pythonic"], "[get_weather(city=Paris)]")
    assert not turn.calls[0].has_ended and "Paris" in turn.calls[0].arguments


def test_no_calls_are_read_where_none_may_be_made() -> None:
    text = "Look:\n" + write_turn(HERMES, calls=NOW) + "\n"
    assert parse(HERMES, text, parse_calls=False) == Turn(content=text)


def test_only_known_tools_are_called_without_a_delimiter() -> None:
    llama = BUILT_IN["llama3"]
    for text in ('{"name": "Bob", "parameters": {}}', '{"title": "now"}', "[1, 2]"):
        assert parse(llama, text) == Turn(content=text)
    assert parse(llama, '<|python_tag|>{"name": "now", "parameters": {}}').decode_calls() == NOW
    assert parse(llama, 'Sure: {"name": "now", "parameters": {}}').calls == []


def test_reasoning_opens_only_at_the_start_and_may_be_open_already() -> None:
    assert parse(QWEN3, "<think>a</think>b<think>c</think>") == Turn("a", "b<think>c</think>")
    assert parse(QWEN3, "a\n</think>\n\nb", in_reasoning=True) == Turn("a", "b")
    assert parse(QWEN3, "\n\n</think>\n\nb", in_reasoning=True) == Turn("", "b")
    assert parse(QWEN3, "cut", in_reasoning=True) == Turn("cut", "")


def test_a_call_ends_reasoning_where_the_dialect_says_so() -> None:
    text = "hm\n" + write_turn(CODER, calls=NOW)
    assert parse(BUILT_IN["qwen3_5"], text, in_reasoning=True).decode_calls() == NOW
    assert parse(QWEN3, text, in_reasoning=True).calls == []


HEADERS = [
    '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>',
    ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}<|call|>',
    '<|channel|>commentary to=functions.now<|message|>{"a": 1}',
]


@pytest.mark.parametrize("header", HEADERS)
def test_messages_of_harmony(header: str) -> None:
    assert parse(HARMONY, header).decode_calls() == [("now", {"a": 1})]
    before = "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
    before += "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
    text = before + header
    turn = parse(HARMONY, text)
    assert (turn.reasoning, turn.content) == ("One.\nTwo.", "Wait.")
    assert turn.decode_calls() == [("now", {"a": 1})]
    assert parse(HARMONY, *text) == turn
    final = before + "<|channel|>final<|message|>Done: to=functions.x<|return|>"
    assert parse(HARMONY, final).content == "Wait.\nDone: to=functions.x"


def test_the_parser_tells_whether_reasoning_goes_on() -> None:
    parser = create_parser(QWEN3)
    states = []
    for text in ("<thi", "nk>\n", "a", "b\n", "</think>", "c"):
        parser.push(text)
        states.append(parser.is_reasoning)
    assert states == [False, True, True, True, False, False]


def test_text_between_and_after_calls_is_content() -> None:
    call = write_turn(HERMES, calls=NOW)
    turn = parse(HERMES, f"A\n{call}\nB\n{call}\n")
    assert turn.content == "A\nB" and turn.decode_calls() == NOW * 2


def test_escapes_in_literals_are_read() -> None:
    text = r"""[get_weather(city='a\'b\n\u00e9\\', tags=["\ud83d\ude00", 'x"y'], days=-1_0, limits={'low': None,})]"""
    turn = parse(BUILT_IN["llama3_pythonic"], *text)
    expected = {"city": "a'b\né\\", "tags": ["😀", 'x"y'], "days": -10, "limits": {"low": None}}
    assert json.loads(turn.calls[0].arguments) == expected


@pytest.mark.parametrize("name", [name for name, dialect in BUILT_IN.items() if dialect.calls is not None])
def test_a_required_call_that_is_cut_leaves_no_content(name: str) -> None:
    text = write_turn(BUILT_IN[name], calls=NOW * 2)
    for cut in range(len(text)):
        assert parse(BUILT_IN[name], text[:cut], requires_call=True).content == "", text[:cut]


FORMED = [name for name, one in BUILT_IN.items() if one.reasoning is not None]


@pytest.mark.parametrize("content", [" yes", "\n\nyes", "yes \n", " ", '{"a": 1}'])
@pytest.mark.parametrize("name", FORMED)
def test_whitespace_of_content_under_a_grammar_is_kept(name: str, content: str) -> None:
    dialect = BUILT_IN[name]
    text = write_turn(dialect, reasoning="Hm.", content=content)
    for texts in ([text], list(text)):
        assert parse(dialect, *texts, content_has_form=True) == Turn("Hm.", content)


@pytest.mark.parametrize("name", ["qwen3", "kimi_k2", "harmony"])
def test_content_after_reasoning_keeps_the_indentation_of_its_first_line(name: str) -> None:
    dialect = BUILT_IN[name]
    for before, content in (("\n\n", "    a\n    b"), ("\n", "\tx"), (" ", "x"), ("", "x")):
        text = write_turn(dialect, reasoning="Hm.", content="@").replace("\n\n@", "@").replace("@", before + content)
        for texts in ([text], list(text)):
            assert parse(dialect, *texts) == Turn("Hm.", content), text
    assert parse(dialect, write_turn(dialect, reasoning="Hm.") + "\n\n   ") == Turn("Hm.", "")


def test_the_final_message_of_harmony_may_say_that_it_is_json() -> None:
    text = '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>'
    for texts in ([text], list(text)):
        assert parse(HARMONY, *texts).content == '{"a": 1}'


@pytest.mark.parametrize(
    "header", ["commentary to=browser.search <|constrain|>json", "analysis to=browser.search code"]
)
def test_a_call_of_harmony_may_name_a_tool_that_is_no_function(header: str) -> None:
    text = f'<|channel|>{header}<|message|>{{"q": 1}}<|call|>'
    for texts in ([text], list(text)):
        assert parse(HARMONY, *texts).decode_calls() == [("browser.search", {"q": 1})]
    tokenizer = get_tokenizer(HARMONY, True)
    grammar = write_grammar(tokenizer, HARMONY, TOOLS, ToolChoice("auto"))
    assert not accepts(tokenizer, grammar, text)
    known = text.replace("browser.search", "functions.now").replace(" code", " <|constrain|>json")
    assert accepts(tokenizer, grammar, known.removesuffix("<|call|>"))
