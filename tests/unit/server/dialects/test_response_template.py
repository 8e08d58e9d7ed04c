"""`response_template` of a checkpoint: our results equal those of transformers' own parser."""

from __future__ import annotations

import copy
import re

import pytest
from transformers.utils.chat_parsing import parse_response

from serve_llm.server.dialects.dialect import DialectError
from serve_llm.server.dialects.response_template import read_response_template
from serve_llm.server.dialects.tool import Tool
from serve_llm.server.dialects.turn import opens_reasoning, parse_turn

Template = dict[str, object]
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
WHOLE = {"type": "function", "function": "{content}"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "parts": {"type": "array"}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "clock")]
IM_START = "<|im_start|>assistant\n"


def make(anchor: object, **fields: object) -> Template:
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


def make_tags(pattern: str, **more: object) -> Template:
    arguments = {"tag_pattern": pattern, "value_parser": {"name": "json", "args": {"allow_non_json": True}}}
    return {"repeats": True, "content": "xml-inline", "content_args": arguments, "transform": NAMED, **more}


THINK = {"open": "<think>", "close": "</think>"}
HERMES = make(
    IM_START,
    thinking=THINK,
    tool_calls={"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json", "transform": WHOLE},
    content={"close": "<|im_end|>"},
)
PATTERNS = make(
    IM_START,
    reasoning_content={"open": "<think>", "close_pattern": r"</think>\s*"},
    tool_calls={
        "open_pattern": r"<tool_call>\s*",
        "close_pattern": r"\s*</tool_call>\s*",
        "repeats": True,
        "content": "json",
        "transform": WHOLE,
    },
    content={"close_pattern": r"<\|im_end\|>\s*"},
)
CODER = make(
    IM_START,
    thinking=THINK,
    tool_calls=make_tags(
        r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
        open_pattern=r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
        close_pattern=r"</tool_call>\s*",
    ),
    content={"close": "<|im_end|>"},
)
GLM = make(
    "<|assistant|>",
    thinking=THINK,
    tool_calls=make_tags(
        r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        open_pattern=r"<tool_call>(?P<name>[^\s<]+)\n?",
        close_pattern=r"</tool_call>\s*",
    ),
    content={"close": ["<|user|>", "<|observation|>"]},
)
COMMAND = make(
    "<|CHATBOT_TOKEN|>",
    thinking={"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
    content={"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
    tool_calls={
        "open": "<|START_ACTION|>",
        "close": "<|END_ACTION|>",
        "content": "json",
        "transform_each": True,
        "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
    },
)
ERNIE = make(
    "Assistant:",
    thinking={"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
    content={"open": "<response>\n", "close_pattern": r"\n?</response>"},
    tool_calls={"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json", "transform": WHOLE},
)
HARMONY = make(
    "<|start|>assistant",
    thinking={"open": "<|channel|>analysis<|message|>", "close": "<|end|>"},
    content={"open": "<|channel|>final<|message|>", "close": ["<|end|>", "<|return|>"]},
    tool_calls={
        "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
        "close": "<|call|>",
        "repeats": True,
        "content": "json",
        "transform": NAMED,
    },
)
GEMMA = make(
    ["<|turn>model\n", "<tool_response|>"],
    thinking={"open": "<|channel>thought\n", "close": "<channel|>"},
    tool_calls={
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": NAMED,
    },
    content={"close": ["<turn|>", "<|tool_response>"]},
)
LLAMA = make(
    "<|end_header_id|>\n\n",
    tool_calls={
        "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
        "close_pattern": r"\}<\|eot_id\|>\s*",
        "repeats": True,
        "content": "json",
        "transform": NAMED,
    },
    content={"close_pattern": r"<\|eot_id\|>\s*"},
)
NEMOTRON = {
    "start_anchor_pattern": r"<\|im_start\|>assistant\n<think>(?:\n|</think>)?",
    "fields": {
        "reasoning_content": {"open_pattern": r"(?=[\s\S]*?</think>)", "close_pattern": r"</think>\s*"},
        "tool_calls": make_tags(
            r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
            open_pattern=r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            close_pattern=r"</tool_call>\s*",
        ),
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}
DISTILL = make(
    "<｜Assistant｜><think>\n",
    reasoning_content={"open_pattern": r"(?=[\s\S]*?</think>)", "close_pattern": r"</think>\s*"},
    content={"close_pattern": r"<｜end▁of▁sentence｜>\s*|$"},
)
KEYS = make(
    "<a>",
    tool_calls={
        "open": "<tool>",
        "close": "</tool>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{content.tool}", "arguments": "{content.args}"}},
    },
    content={"close": "<end>"},
)
FUNCTION = make(
    "<a>",
    tool_calls={
        "open_pattern": r"<function=(?P<name>\w+)>",
        "close": "</function>",
        "repeats": True,
        "content": "json",
        "transform": NAMED,
    },
    content={"close": "<end>"},
)

CASES: list[tuple[str, Template, str, str]] = [
    ("hermes answer", HERMES, IM_START, "Hello there."),
    ("hermes end", HERMES, IM_START, "Hello there.<|im_end|>"),
    ("hermes reasoning", HERMES, IM_START, "<think>\nIs it a greeting?\n</think>\n\nHello."),
    ("hermes open reasoning", HERMES, IM_START + "<think>\n", "Is it?\n</think>\n\nHello."),
    ("hermes closed reasoning", HERMES, IM_START + "<think>\n\n</think>\n\n", "Hello."),
    (
        "hermes earlier turn",
        HERMES,
        f"{IM_START}<think>\na</think>b<|im_end|>\n<|im_start|>user\n<think> aloud<|im_end|>\n{IM_START}",
        "Hello.",
    ),
    (
        "patterns calls",
        PATTERNS,
        IM_START,
        'Looking.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    ),
    (
        "hermes inline",
        HERMES,
        IM_START,
        '<think>Go.</think>\n<tool_call>{"name": "weather", "arguments": {"city": "\\"Köln\\" <b>"}}</tool_call>',
    ),
    (
        "patterns",
        PATTERNS,
        IM_START + "<think>\n",
        'Need it.\n</think>\n\n<tool_call>\n{"name": "clock", "arguments": {"parts": [1, {"a": null}]}}\n'
        "</tool_call><|im_end|>\n",
    ),
    (
        "coder",
        CODER,
        IM_START,
        "<tool_call>\n<function=weather>\n<parameter=city>\nBonn am Rhein\n</parameter>\n<parameter=days>\n3\n"
        '</parameter>\n<parameter=parts>\n["a", {"b": 1}]\n</parameter>\n</function>\n</tool_call>',
    ),
    (
        "coder twice",
        CODER,
        IM_START,
        "<think>\nTwo.\n</think>\n\nLet me see.\n\n<tool_call>\n<function=clock>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        "glm",
        GLM,
        "<|assistant|>",
        "\n<think>Hm.</think>\nOne moment.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>",
    ),
    ("glm no arguments", GLM, "<|assistant|>", "<think></think><tool_call>clock</tool_call>"),
    (
        "command calls",
        COMMAND,
        "<|CHATBOT_TOKEN|>",
        "<|START_THINKING|>A tool will do.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Bonn"}},\n'
        '    {"tool_call_id": "1", "tool_name": "clock", "parameters": {}}\n]<|END_ACTION|>',
    ),
    (
        "command answer",
        COMMAND,
        "<|CHATBOT_TOKEN|>",
        "<|START_THINKING|>Easy.<|END_THINKING|><|START_RESPONSE|>It rains.<|END_RESPONSE|>",
    ),
    ("ernie answer", ERNIE, "Assistant:", "Easy.\n</think>\n\n<response>\nIt rains.\n</response>\n"),
    (
        "ernie call",
        ERNIE,
        "Assistant:",
        'Easy.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n',
    ),
    (
        "harmony answer",
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>",
    ),
    (
        "harmony call",
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Bonn"}<|call|>',
    ),
    (
        "gemma",
        GEMMA,
        "<|turn>model\n",
        '<|channel>thought\nA tool.<channel|><|tool_call>call:weather{city:<|"|>Bonn, "NRW"<|"|>,days:2,'
        'parts:[<|"|>a<|"|>,{b:null,c:true}]}<tool_call|><|tool_response>',
    ),
    ("gemma answer", GEMMA, "<|turn>model\n", "It rains.<turn|>"),
    ("llama call", LLAMA, "<|end_header_id|>\n\n", '{"name": "weather", "parameters": {"city": "Bonn"}}<|eot_id|>'),
    ("llama answer", LLAMA, "<|end_header_id|>\n\n", "It rains.<|eot_id|>"),
    ("nemotron", NEMOTRON, IM_START + "<think>\n", "Hm.\n</think>\nIt rains.<|im_end|>\n"),
    ("nemotron off", NEMOTRON, IM_START + "<think></think>", "It rains.<|im_end|>\n"),
    (
        "nemotron call",
        NEMOTRON,
        IM_START + "<think>\n",
        "Hm.\n</think>\n<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>\n",
    ),
    ("distill", DISTILL, "<｜Assistant｜><think>\n", "Hm.\n</think>\n\nIt rains.<｜end▁of▁sentence｜>"),
    ("keys", KEYS, "<a>", 'Now: <tool>{"tool": "weather", "args": {"city": "Bonn"}}</tool>'),
    ("function", FUNCTION, "<a>", '<function=weather>{"city": "Bonn"}</function><function=clock>{}</function><end>'),
]


@pytest.mark.parametrize(("template", "prompt", "text"), [pytest.param(*case[1:], id=case[0]) for case in CASES])
def test_answers_are_those_of_transformers(template: Template, prompt: str, text: str) -> None:
    expected = parse_response(text, copy.deepcopy(template), prefix=prompt, tools=TOOLS)
    dialect = read_response_template(template)
    tools = [Tool(tool["function"]["name"], "", SCHEMA) for tool in TOOLS]
    header = re.sub(r"<think>.*", "", prompt, flags=re.DOTALL)
    turn = parse_turn(dialect, tools, text, in_reasoning=opens_reasoning(dialect, prompt, header))
    reasoning = expected.get("thinking") or expected.get("reasoning_content") or ""
    assert turn.reasoning == reasoning
    assert turn.content.strip() == expected.get("content", "")
    calls = [call["function"] for call in expected.get("tool_calls", [])]
    assert [(call.name, call.read_arguments()) for call in turn.calls] == [
        (call["name"], call["arguments"]) for call in calls
    ]


def test_content_is_kept_where_transformers_loses_it() -> None:
    """Its parser replaces content by the whitespace between two calls, unless `close` includes that."""
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    text = f"Looking.\n{call}\n{call}"
    assert "content" not in parse_response(text, copy.deepcopy(HERMES), prefix=IM_START)
    turn = parse_turn(read_response_template(HERMES), [Tool("clock")], text)
    assert (turn.content, len(turn.calls)) == ("Looking.", 2)


REFUSED = [
    (None, "Expected `object`"),
    ({"fields": {}, "version": 2}, "version"),
    ({"fields": {"mood": {}}}, "mood"),
    ({"fields": {"content": {"optional": False}}}, "content must be optional"),
    (make("<a>", content={"open_pattern": "<.*>", "close": "</a>"}), "more than a delimiter"),
    (make("<a>", thinking={"open": "<think>"}), "close"),
    (make("<a>", tool_calls={"open": "<t>", "close": "</t>", "content": "kv-lines"}), "kv-lines"),
    (make("<a>", tool_calls={"open": "<t>", "close": "</t>", "content": "json"}), "transform"),
    (make("<a>", tool_calls={"opens": "<t>"}), "opens"),
]


@pytest.mark.parametrize(("template", "named"), REFUSED)
def test_what_cannot_be_read_is_named(template: object, named: str) -> None:
    with pytest.raises(DialectError, match=named):
        read_response_template(template)
