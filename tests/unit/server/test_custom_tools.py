"""Custom tools of chat completions: their texts in answers, streams and histories, and how they are enforced."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.server.prompt.custom_tools import CustomInputReader, read_custom_input
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.schema.chat import ChatCompletion, ChatEvent
from support.serving import Served
from support.tools import CLOCK, with_tools, write_call

Serve = Callable[..., Served]
ServeText = Callable[..., Served]
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Change files."}}
NAMED = {"type": "custom", "custom": {"name": "patch"}}
TOOLS = [PATCH, CLOCK]
LARK = {"syntax": "lark", "definition": "start: line+\nline: /[a-z]+/ LF\n%import common.LF"}
TEXT = 'a "b"\n\\ é 😀\t'


@pytest.fixture
def serve_text(serve: Serve, model: ServedModel) -> ServeText:
    """Serve an engine that writes a text and ends it."""

    def make(text: str, **more: Any) -> Served:
        return serve(text + "<|end|>", served_model=with_tools(model), model_info=None, **more)

    return make


def with_format(grammar: object) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": grammar}}}


READ: list[tuple[str, str]] = [
    (json.dumps({"input": TEXT}), TEXT),
    (json.dumps({"input": TEXT}, ensure_ascii=False), TEXT),
    ('{ "input" :\n"" }', ""),
    (r'{"input": "\ud83d x \ude00"}', "\ufffd x \ufffd"),
    (r'{"input": "\ud83d\n\ud83d\ude00\ud83d"}', "\ufffd\n😀\ufffd"),
    (r'{"input": "cut \u00', "cut "),
    (r'{"input": "cut \ud83d', "cut "),
    (r'{"input": "no escape \uzzzz"}', "no escape "),
    ('{"text": "a"}', '{"text": "a"}'),
    ('{"inp', '{"inp'),
]


@pytest.mark.parametrize(("arguments", "text"), READ, ids=range(len(READ)))
def test_reading_in_any_pieces(arguments: str, text: str) -> None:
    assert read_custom_input(arguments) == text
    for cut in range(len(arguments)):
        reader = CustomInputReader()
        assert reader.push(arguments[:cut]) + reader.push(arguments[cut:]) + reader.finish() == text
    reader = CustomInputReader()
    assert "".join([*map(reader.push, arguments), reader.finish()]) == text


def fold_calls(events: list[Any]) -> list[Any]:
    calls: list[Any] = []
    for event in events:
        ChatEvent.model_validate(event, extra="forbid")
        for entry in event["choices"][0]["delta"].get("tool_calls", []):
            index = entry.pop("index")
            if "id" in entry:
                assert index == len(calls)
                calls.append(entry)
                continue
            ((kind, part),) = entry.items()
            ((field, text),) = part.items()
            assert index == len(calls) - 1 and kind == calls[-1]["type"]
            calls[-1][kind][field] += text
    return calls


@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
@pytest.mark.parametrize("written", [TEXT, "", "x" * 300])
def test_answers(serve_text: ServeText, written: str, tokens_per_step: int) -> None:
    served = serve_text(f"{write_call('patch', input=written)}\n{write_call('clock')}", tokens_per_step=tokens_per_step)
    body = served.chat(tools=TOOLS)
    ChatCompletion.model_validate(body.json(), extra="forbid")
    (choice,) = body.json()["choices"]
    calls = choice["message"]["tool_calls"]
    ids = [call.pop("id") for call in calls]
    assert calls == [
        {"type": "custom", "custom": {"name": "patch", "input": written}},
        {"type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]
    assert len(set(ids)) == 2 and choice["finish_reason"] == "tool_calls"
    streamed = fold_calls(served.chat(tools=TOOLS, stream=True).events())
    assert [{key: call[key] for key in call if key != "id"} for call in streamed] == calls


def test_the_text_leaves_while_it_is_written(serve_text: ServeText) -> None:
    served = serve_text(write_call("patch", input="one two three " * 20))
    events = served.chat(tools=TOOLS, stream=True).events()
    deltas = [event["choices"][0]["delta"] for event in events]
    assert len([delta for delta in deltas if "tool_calls" in delta]) > 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut(serve_text: ServeText, stream: bool) -> None:
    served = serve_text(write_call("patch", input="one two three four five"))
    reply = served.chat(tools=TOOLS, stream=stream, max_tokens=30)
    calls = fold_calls(reply.events()) if stream else reply.json()["choices"][0]["message"]["tool_calls"]
    assert "one two three four five".startswith(calls[0]["custom"]["input"]) and calls[0]["custom"]["input"]


def test_calls_can_be_sent_back(serve_text: ServeText) -> None:
    served = serve_text(write_call("patch", input=TEXT))
    message = served.chat(tools=TOOLS).json()["choices"][0]["message"]
    call_id = message["tool_calls"][0]["id"]
    history = [{"role": "user", "content": "Hi"}, message, {"role": "tool", "tool_call_id": call_id, "content": "Ok."}]
    assert served.chat(messages=history, tools=TOOLS).status == 200
    prompt = served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)
    assert json.dumps({"input": TEXT}, ensure_ascii=False) in prompt and "<|tool|>\nOk." in prompt


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        (NAMED, {"patch"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, {"patch"}),
        ("required", {"patch", "clock"}),
    ],
)
@pytest.mark.parametrize("grammar", [LARK, {"syntax": "regex", "definition": "[a-z]+"}])
def test_formats_are_enforced(serve_text: ServeText, choice: object, names: set[str], grammar: object) -> None:
    served = serve_text("Hello.")
    reply = served.chat(tools=[with_format(grammar), CLOCK], tool_choice=choice)
    assert reply.status == 200, reply.content
    written = served.engine.submitted[-1].sampling.grammar
    assert {name for name in ("patch", "clock") if name in written} == names and "a-z" in written


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [PATCH, {**CLOCK, "function": {"name": "patch"}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar"}}}]},
         "tools[0].custom.format.grammar"),
        ({"tools": [with_format({"syntax": "lark", "definition": "start: a"})]}, "tools[0].custom.format.grammar"),
        ({"tools": [with_format({"syntax": "regex", "definition": "(?=a)"})]},
         "tools[0].custom.format at #/properties/input"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "clock"}}}, "tool_choice.custom.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "web"}]}}}, "tool_choice.allowed_tools.tools[0].type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "patch"}}]}]},
         "messages[0].tool_calls[0].custom.input"),
    ],
    ids=range(10),
)  # fmt: skip
def test_refused(serve_text: ServeText, body: dict[str, Any], param: str) -> None:
    reply = serve_text("Hello.").chat(**body)
    assert reply.status == 400, reply.content
    error = reply.json()["error"]
    assert param in f"{error['param']} {error['message']}"
