"""POST /v1/chat/completions on a scripted engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from serve_llm.engine.options import Options
from serve_llm.server.app import create_app
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.replicas import Replicas
from serve_llm.server.schema.chat import ChatCompletion, ChatEvent
from support.asgi import Reply, fetch
from support.fakes import ScriptedEngine, facts, logprobs_of
from support.serving import TEXT, Served

Serve = Callable[..., Served]
HI = [{"role": "user", "content": "hi"}]


def completion(reply: Reply) -> ChatCompletion:
    assert reply.status == 200, reply.content
    return ChatCompletion.model_validate(reply.json(), extra="forbid")


def events(reply: Reply) -> list[ChatEvent]:
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/event-stream")
    return [ChatEvent.model_validate(event, extra="forbid") for event in reply.events()]


def prompt_text(served: Served) -> str:
    ids = served.engine.submitted[-1].prompt_ids
    return served.model.tokenizer.decode(ids, skip_special_tokens=False)


def test_an_answer(served: Served) -> None:
    found = completion(served.chat(max_tokens=5))
    (choice,) = found.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == served.model.tokenizer.decode(served.ids(TEXT)[:5])
    assert choice.finish_reason == "length" and found.id.startswith("chatcmpl-")
    assert prompt_text(served) == "<|user|>\nhi<|end|>\n<|assistant|>\n"


def test_without_max_tokens_the_context_is_filled(serve: Serve) -> None:
    served = serve("ab<|end|>")
    assert completion(served.chat()).choices[0].finish_reason == "stop"
    (request,) = served.engine.submitted
    assert request.sampling.max_tokens == 2048 - len(request.prompt_ids)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(served: Served, field: str) -> None:
    assert completion(served.chat(**{field: 3})).usage.completion_tokens == 3
    reply = served.chat(**{field: 3000})
    assert (reply.status, reply.json()["error"]["param"]) == (400, field)
    assert field in reply.json()["error"]["message"]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_has_the_role_first(served: Served, n: int) -> None:
    size = len(served.ids(TEXT))
    found = events(served.chat(max_tokens=size, stream=True, n=n))
    for index in range(n):
        own = [event.choices[0] for event in found if event.choices[0].index == index]
        assert own[0].delta.role == "assistant" and own[0].delta.content == ""
        assert all("role" not in choice.delta.model_fields_set for choice in own[1:])
        assert "".join(choice.delta.content or "" for choice in own) == TEXT
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["length"]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("one", "one"),
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ("", ""),
    ],
)
def test_contents(served: Served, content: object, text: str) -> None:
    assert served.chat(messages=[{"role": "user", "content": content}]).status == 200
    assert prompt_text(served).startswith(f"<|user|>\n{text}<|end|>")


def test_every_role_and_what_else_messages_hold_reach_the_template(model: ServedModel) -> None:
    source = (
        "{% for m in messages %}{{ m.role }}={{ m.content }}/{{ m.name }}/{{ m.tool_calls | default([]) | length }};"
        "{% endfor %}{{ mood }}"
    )
    engine = ScriptedEngine(lambda request: [40])
    custom = ServedModel.load(model.directory, Options.from_kwargs("demo", chat_template=source))
    app, *_ = create_app(Replicas([engine]), custom, Options.from_kwargs("demo"))
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d", "name": "Ann"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
    ]
    body = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": {"mood": "good"}}
    assert fetch(app, "POST", "/v1/chat/completions", body).status == 200
    text = model.tokenizer.decode(engine.submitted[0].prompt_ids)
    assert text == "system=s//0;developer=d/Ann/0;user=u//0;assistant=None//1;tool=t//0;good"


def test_continuing_the_final_message(served: Served) -> None:
    talk = [*HI, {"role": "assistant", "content": "def "}]
    assert served.chat(messages=talk, continue_final_message=True).status == 200
    assert prompt_text(served).endswith("<|assistant|>\ndef ")
    both = served.chat(messages=talk, continue_final_message=True, add_generation_prompt=True)
    assert (both.status, both.json()["error"]["param"]) == (400, "continue_final_message")
    assert served.chat(add_generation_prompt=False).status == 200
    assert prompt_text(served).endswith("hi<|end|>\n")


def test_logprobs(serve: Serve) -> None:
    served = serve("a\U0001f600")
    ids = served.ids("a\U0001f600")
    body = {"max_tokens": len(ids), "logprobs": True, "top_logprobs": 2}
    content = completion(served.chat(**body)).choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode() == "a\U0001f600"
    assert [token.logprob for token in content] == [logprobs_of(one, 2).logprob for one in ids]
    assert all(len(token.top_logprobs) == 2 for token in content)
    assert content[1].token == "\ufffd", "half a character has bytes, but no text"
    streamed = [event.choices[0].logprobs for event in events(served.chat(**body, stream=True))]
    assert [token for part in streamed if part is not None for token in part.content] == content
    plain = completion(served.chat(max_tokens=2, logprobs=True)).choices[0].logprobs.content
    assert [token.top_logprobs for token in plain] == [[], []]


def test_usage_is_there_also_for_token_ids(served: Served) -> None:
    found = completion(served.chat(max_tokens=2, return_token_ids=True, prompt_logprobs=0))
    assert found.choices[0].token_ids == served.ids(TEXT)[:2]
    assert found.choices[0].prompt_token_ids == served.engine.submitted[0].prompt_ids
    assert len(found.choices[0].prompt_logprobs) == found.usage.prompt_tokens
    assert found.usage.prompt_tokens_details.cached_tokens == 0


FUNCTION = {"type": "function", "function": {"name": "f"}}
BAD: list[tuple[dict[str, object], str, str | None]] = [
    ({"messages": []}, "messages", None),
    ({"messages": None}, "messages", None),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", None),
    ({"messages": [*HI, {"content": "x"}]}, "messages[1].role", None),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0]", "unsupported"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", None),
    ({"messages": HI * 10_001}, "messages", None),
    ({"messages": [{"role": "user", "content": "x " * 5000}]}, "messages", "context_length_exceeded"),
    ({"tools": [FUNCTION]}, "tools", "unsupported"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported"),
    ({"functions": [{}]}, "functions", "unsupported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "unsupported"),
    ({"top_logprobs": 2}, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
    ({"logprobs": 1}, "logprobs", None),
    ({"max_completion_tokens": -1}, "max_completion_tokens", None),
    ({"best_of": 1}, "best_of", None),
    ({"prompt": "x"}, "prompt", None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "code"), BAD, ids=lambda value: str(value)[:50])
def test_a_bad_field_is_named(served: Served, body: dict[str, object], param: str, code: str | None) -> None:
    reply = served.chat(**body)
    error = reply.json()["error"]
    assert (reply.status, error["param"], error["code"]) == (400, param, code), error
    assert served.engine.submitted == []


def test_what_asks_for_nothing_is_accepted(served: Served) -> None:
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "functions": None}
    assert served.chat(**nothing, parallel_tool_calls=True, max_tokens=1).status == 200


def test_a_model_without_a_template_says_so(model: ServedModel) -> None:
    engine = ScriptedEngine(lambda request: [40])
    app, *_ = create_app(Replicas([engine]), replace(model, template=None), Options.from_kwargs("x"))
    reply = fetch(app, "POST", "/v1/chat/completions", {"messages": HI})
    assert reply.status == 400 and "--chat-template" in reply.json()["error"]["message"]


def test_a_long_conversation_is_prepared_off_the_event_loop(serve: Serve) -> None:
    served = serve(model_facts=facts(max_model_len=10**6))
    assert served.chat(messages=HI * 5000, max_tokens=1).status == 200
    assert len(served.engine.submitted[0].prompt_ids) > 10_000
