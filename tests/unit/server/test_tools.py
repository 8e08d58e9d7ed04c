"""Tools and reasoning in POST /v1/chat/completions on a scripted engine: prompts, answers and streams."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.server.dialects.dialect import CallFormat, Dialect, JsonCodec
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.prompt.model import ServedModel
from support.choices import Choice, fold, read_body
from support.dialects import FEW_DIALECTS, write_turn
from support.fakes import logprobs_of
from support.matrix import mostly_slow
from support.serving import Served
from support.tools import TOOLS, WEATHER, with_tools, write_call

Serve = Callable[..., Served]
OSLO = write_call("get_weather", city="Oslo", days=2)
CALL = {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'}


@pytest.fixture
def serve_text(serve: Serve, model: ServedModel) -> Callable[..., Served]:
    """Serve an engine that writes a text and ends it."""

    def make(text: str, **more: Any) -> Served:
        return serve(text + "<|end|>", **{"served_model": with_tools(model), "model_info": None, **more})

    return make


def functions(choice: Choice) -> list[dict[str, str]]:
    return [call["function"] for call in choice["message"].get("tool_calls", [])]


def prompt_text(served: Served) -> str:
    return served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


TEXTS: list[tuple[str, str, str | None, list[dict[str, str]], str]] = [
    # written, reasoning, content, calls, finish_reason
    ("Hello.", "", "Hello.", [], "stop"),
    (OSLO, "", None, [CALL], "tool_calls"),
    ("<think>\nHm.\n</think>\n\nHello.", "Hm.", "Hello.", [], "stop"),
    (f"<think>\nHm.\n</think>\n\n{OSLO}", "Hm.", None, [CALL], "tool_calls"),
    (f"I look.\n{OSLO}\n{write_call('clock')}", "", "I look.", [CALL, {"name": "clock", "arguments": "{}"}],
     "tool_calls"),
    ("a < b <tool_cal", "", "a < b <tool_cal", [], "stop"),
]  # fmt: skip


@pytest.mark.parametrize("tokens_per_step", mostly_slow([1, 5, 1000], [5]))
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("written", "reasoning", "content", "calls", "finish_reason"), TEXTS, ids=range(len(TEXTS)))
def test_answers(
    serve_text: Callable[..., Served],
    written: str,
    reasoning: str,
    content: str | None,
    calls: list[dict[str, str]],
    finish_reason: str,
    stream: bool,
    tokens_per_step: int,
) -> None:
    served = serve_text(written, tokens_per_step=tokens_per_step)
    reply = served.chat(tools=TOOLS, stream=stream, n=2)
    for index in range(2):
        choice = fold(reply, index) if stream else reply.json()["choices"][index]
        if not stream:
            read_body(reply)
        message = choice["message"]
        assert (message.get("reasoning", ""), message["content"]) == (reasoning, content)
        assert functions(choice) == calls
        assert choice["finish_reason"] == finish_reason
    ids = [call["id"] for choice in [choice] for call in choice["message"].get("tool_calls", [])]
    assert len(set(ids)) == len(calls) and all(one.startswith("call_") for one in ids)


def test_arguments_leave_before_the_call_is_complete(serve_text: Callable[..., Served]) -> None:
    served = serve_text(write_call("get_weather", city="x" * 200))
    deltas = [event["choices"][0]["delta"] for event in served.chat(tools=TOOLS, stream=True).events()]
    pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert len(pieces) > 20 and pieces[0]["id"] and all("id" not in piece for piece in pieces[1:])


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_that_is_cut_leaves_no_content(serve_text: Callable[..., Served], stream: bool) -> None:
    served = serve_text(OSLO)
    reply = served.chat(tools=TOOLS, tool_choice="required", max_tokens=3, stream=stream)
    choice = fold(reply) if stream else read_body(reply)
    assert not choice["message"]["content"] and functions(choice) == []
    assert choice["finish_reason"] == "length" and OSLO.startswith(
        served.chat(max_tokens=3).json()["choices"][0]["message"]["content"]
    )


def test_a_spelled_end_of_the_turn_is_content(serve_text: Callable[..., Served], model: ServedModel) -> None:
    spelled = with_tools(model, BUILT_IN["mistral"])
    html = "HTML: <s>old</s> new."
    assert read_body(serve_text(html, served_model=spelled).chat())["message"]["content"] == html
    assert read_body(serve_text(html + "</s>", served_model=spelled).chat())["message"]["content"] == html


@pytest.mark.parametrize("name", ["qwen3_coder", "mistral"])
def test_content_with_a_form_holds_what_reads_like_a_call(
    serve_text: Callable[..., Served], model: ServedModel, name: str
) -> None:
    content = json.dumps({"t": "[THINK]x <tool_call><function=clock></function></tool_call> [TOOL_CALLS]clock[ARGS]{}"})
    served = serve_text(content, served_model=with_tools(model, BUILT_IN[name]))
    choice = read_body(served.chat(tools=TOOLS, response_format={"type": "json_object"}))
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop")
    assert not choice["message"].get("tool_calls") and not choice["message"].get("reasoning")


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_add_up(serve_text: Callable[..., Served], stream: bool) -> None:
    written = f"<think>\nHm.\n</think>\n\nI look.\n{OSLO}"
    served = serve_text(written)
    ids = served.ids(written + "<|end|>")
    body: dict[str, Any] = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    reply = served.chat(**body, stream=stream, stream_options={"include_usage": True} if stream else None)
    choice = fold(reply) if stream else read_body(reply)
    usage = reply.events()[-1]["usage"] if stream else reply.json()["usage"]
    assert choice["token_ids"] == ids
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [logprobs_of(one, 1).logprob for one in ids]
    assert usage["completion_tokens"] == len(ids)
    num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len(served.ids("Hm.\n")) < num_reasoning <= len(served.ids("<think>\nHm.\n</think>"))


def test_reasoning_is_left_out_on_request(serve_text: Callable[..., Served]) -> None:
    served = serve_text(f"<think>\nHm.\n</think>\n\n{OSLO}")
    body: dict[str, Any] = {"tools": TOOLS, "include_reasoning": False, "logprobs": True, "return_token_ids": True}
    for stream in (False, True):
        reply = served.chat(**body, stream=stream)
        choice = fold(reply) if stream else read_body(reply)
        assert "reasoning" not in choice["message"] and functions(choice) == [CALL]
        text = served.model.tokenizer.decode(choice["token_ids"], skip_special_tokens=False)
        assert "Hm" not in text and OSLO in text
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


def test_the_name_of_the_reasoning_is_an_option(serve_text: Callable[..., Served]) -> None:
    served = serve_text("<think>\nHm.\n</think>\n\nYes.", options={"reasoning_field": "reasoning_content"})
    for stream in (False, True):
        reply = served.chat(stream=stream)
        choice = fold(reply) if stream else read_body(reply)
        assert choice["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_no_choice_leaves_the_text_as_it_is(serve_text: Callable[..., Served]) -> None:
    served = serve_text(f"So: {OSLO}")
    choice = read_body(served.chat(tools=TOOLS, tool_choice="none"))
    assert choice["message"] == {"role": "assistant", "content": f"So: {OSLO}"} and choice["finish_reason"] == "stop"
    assert "get_weather" in prompt_text(served), "the prompt has the tools all the same"


@pytest.mark.parametrize("stream", [False, True])
def test_no_choice_leaves_delimiters_that_are_special_tokens(
    serve_text: Callable[..., Served], model: ServedModel, stream: bool
) -> None:
    """Even if the dialect has nothing but calls."""
    calls = CallFormat(codec=JsonCodec(name_key="name"), open="<|tool|>", close="\n")
    served = serve_text("So: <|tool|>{}\n", served_model=with_tools(model, Dialect(name="x", calls=calls)))
    reply = served.chat(tools=TOOLS, tool_choice="none", stream=stream)
    choice = fold(reply) if stream else read_body(reply)
    assert choice["message"] == {"role": "assistant", "content": "So: <|tool|>{}\n"}
    plain = served.chat(stream=stream)
    choice = fold(plain) if stream else read_body(plain)
    assert choice["message"] == {"role": "assistant", "content": "So: {}\n"}


@pytest.mark.parametrize(
    "name", mostly_slow([name for name, dialect in BUILT_IN.items() if dialect.calls is not None], FEW_DIALECTS)
)
def test_no_choice_leaves_calls_of_every_dialect_in_the_text(
    serve_text: Callable[..., Served], model: ServedModel, name: str
) -> None:
    """All of it stays, except for the delimiters of the content."""
    dialect = BUILT_IN[name]
    text = write_turn(dialect, content="So.", calls=[("get_weather", {"city": "Oslo"})])
    served = serve_text(text, served_model=with_tools(model, dialect))
    replies = [served.chat(tools=TOOLS, tool_choice="none", stream=stream) for stream in (False, True)]
    choices = [read_body(replies[0]), fold(replies[1])]
    assert choices[0]["message"] == choices[1]["message"]
    assert set(choices[0]["message"]) == {"role", "content"} and choices[0]["finish_reason"] == "stop"
    content = choices[0]["message"]["content"]
    if dialect.content is None:
        assert content == text
    else:
        called = text[text.index("get_weather") :]
        assert content.startswith("So.") and called.startswith(content[content.index("get_weather") :])
        assert '"city": "Oslo"}' in content


def test_a_function_needs_no_type(serve_text: Callable[..., Served]) -> None:
    served = serve_text(write_call("get_weather", city="Oslo"))
    bare = [{"function": WEATHER["function"]}]
    message = read_body(served.chat(tools=bare, tool_choice={"function": {"name": "get_weather"}}))["message"]
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    for tools in ([{}], [{"name": "f", "parameters": {}}], [{"type": None, "function": {"name": "f"}}]):
        assert served.chat(tools=tools).json()["error"]["param"].startswith("tools[0].")


def test_a_named_function_ends_with_stop(serve_text: Callable[..., Served]) -> None:
    served = serve_text(OSLO)
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = read_body(served.chat(tools=TOOLS, tool_choice=named))
    assert functions(choice) == [CALL] and choice["finish_reason"] == "stop"


def test_a_cut_call_stays_a_call(serve_text: Callable[..., Served]) -> None:
    served = serve_text(OSLO)
    num_tokens = len(served.ids(OSLO.partition("slo")[0]))
    choice = read_body(served.chat(tools=TOOLS, max_tokens=num_tokens))
    assert choice["finish_reason"] == "length"
    (function,) = functions(choice)
    assert function["name"] == "get_weather" and CALL["arguments"].startswith(function["arguments"])


def test_stop_strings_count_in_content_only(serve_text: Callable[..., Served]) -> None:
    served = serve_text(f"<think>\nOslo?\n</think>\n\nI ask.\n{OSLO}")
    for stream in (False, True):
        reply = served.chat(tools=TOOLS, stop=["Oslo"], stream=stream)
        choice = fold(reply) if stream else read_body(reply)
        assert choice["message"]["reasoning"] == "Oslo?" and functions(choice) == [CALL]
        reply = served.chat(tools=TOOLS, stop=["ask", "call"], stream=stream, logprobs=True)
        choice = fold(reply) if stream else read_body(reply)
        assert choice["message"]["content"] == "I " and not functions(choice)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "ask")


def test_the_prompt_shows_tools_and_history(serve_text: Callable[..., Served]) -> None:
    served = serve_text("Yes.")
    call = {"id": "c1", "type": "function", "function": CALL}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "reasoning": "Hm.", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain."},
    ]
    assert served.chat(messages=messages, tools=[WEATHER]).status == 200
    text = prompt_text(served)
    assert json.dumps(WEATHER["function"]["description"]) in text and '"strict"' not in text
    assert f"<|assistant|>\n<think>\nHm.\n</think>\n\n\n{OSLO}<|end|>\n<|tool|>\nRain.<|end|>\n<|assistant|>\n" in text
    same = [messages[0], {**messages[1], "reasoning": None, "reasoning_content": "Hm."}, messages[2]]
    assert served.chat(messages=same, tools=[WEATHER]).status == 200
    assert prompt_text(served) == text
    tokens = served.post("/tokenize", {"messages": messages, "tools": [WEATHER]}).json()["tokens"]
    assert tokens == served.engine.submitted[-1].prompt_ids


def test_whether_the_prompt_opens_the_reasoning(serve_text: Callable[..., Served]) -> None:
    served = serve_text("Hm.\n</think>\n\nYes.")
    message = read_body(served.chat(chat_template_kwargs={"opens": True}))["message"]
    assert message == {"role": "assistant", "content": "Yes.", "reasoning": "Hm."}
    assert read_body(served.chat())["message"]["content"] == "Hm.\n</think>\n\nYes."
    for effort, expected in (("low", True), ("none", False)):
        served.chat(chat_template_kwargs={"opens": True}, reasoning_effort=effort)
        assert prompt_text(served).endswith("<|assistant|>\n<think>\n") == expected
    assert prompt_text(served).endswith("</think>\n\n")


def test_a_model_without_a_dialect_refuses_tools(served: Served) -> None:
    reply = served.chat(tools=TOOLS)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "tools")
    assert "--dialect" in reply.json()["error"]["message"]
    assert served.chat(tools=TOOLS, tool_choice="none", max_tokens=1).status == 200


def test_a_template_that_does_not_show_tools_refuses_them(
    serve_text: Callable[..., Served], model: ServedModel
) -> None:
    blind = dataclasses.replace(with_tools(model), template=model.template)
    served = serve_text("Yes.", served_model=blind)
    reply = served.chat(tools=TOOLS)
    assert (reply.status, reply.json()["error"]["param"]) == (400, "tools")
    assert "chat template" in reply.json()["error"]["message"]
    assert served.chat(tools=TOOLS, tool_choice="none").status == 200


def test_a_truncated_call_is_left_out_with_its_output(serve_text: Callable[..., Served]) -> None:
    """Otherwise an agent whose model was cut at max_tokens could never continue its conversation."""
    served = serve_text("Hello.")
    user = {"role": "user", "content": "Hi"}
    cut = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "Eur'}}
    whole = {"id": "2", "type": "function", "function": {"name": "clock", "arguments": "null"}}
    outputs = [{"role": "tool", "tool_call_id": one, "content": f"out {one}"} for one in ("1", "2")]
    assert served.chat(messages=[user, user], tools=TOOLS).status == 200
    without = prompt_text(served)
    calls = {"role": "assistant", "content": None, "tool_calls": [cut]}
    reply = served.chat(messages=[user, calls, outputs[0], user], tools=TOOLS)
    assert reply.headers["x-ignored-fields"] == "messages[1].tool_calls[0], messages[2]"
    assert prompt_text(served) == without
    reply = served.chat(messages=[user, {**calls, "tool_calls": [cut, whole]}, *outputs, user], tools=TOOLS)
    assert reply.headers["x-ignored-fields"] == "messages[1].tool_calls[0], messages[2]"
    assert "out 2" in prompt_text(served) and "out 1" not in prompt_text(served)
    body = {"messages": [user, calls, user]}
    tokenized = served.post("/tokenize", body)
    assert tokenized.status == 200 and tokenized.headers["x-ignored-fields"] == "messages[1].tool_calls[0]"


def test_the_old_form_of_calls_in_messages_is_read(serve_text: Callable[..., Served]) -> None:
    served = serve_text("Hello.")
    user = {"role": "user", "content": "Hi"}
    new = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": CALL}]}
    assert (
        served.chat(messages=[user, new, {"role": "tool", "tool_call_id": "call_0", "content": "Rain"}]).status == 200
    )
    expected = prompt_text(served)
    old = {"role": "assistant", "content": None, "function_call": CALL}
    output = {"role": "function", "name": "get_weather", "content": "Rain"}
    assert served.chat(messages=[user, old, output]).status == 200
    assert prompt_text(served) == expected and "Oslo" in expected
    for call in ({"arguments": "{}"}, {"name": []}, "x"):
        refused = served.chat(messages=[user, {**old, "function_call": call}])
        assert refused.status == 400 and refused.json()["error"]["param"] == "messages[1].function_call.name"


def test_each_old_call_has_an_id_of_its_own(serve_text: Callable[..., Served]) -> None:
    """The output of a call whose arguments were truncated is left out, and no other."""
    served = serve_text("Hello.")
    messages: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]
    for number, arguments in enumerate(('{"city": "Rome"}', '{"ci', '{"city": "Oslo"}')):
        call = {"name": "get_weather", "arguments": arguments}
        messages.append({"role": "assistant", "content": None, "function_call": call})
        messages.append({"role": "function", "name": "get_weather", "content": f"out {number}"})
    reply = served.chat(messages=messages)
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "messages[3].tool_calls[0], messages[4]"
    prompt = prompt_text(served)
    assert "out 0" in prompt and "out 1" not in prompt and "out 2" in prompt
