"""POST /v1/chat/completions on a scripted engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParamsBase

from serve_llm.common.options.sources import make_options
from serve_llm.server.app import create_app
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.schema.chat import ChatCompletion, ChatEvent, ChatRequest
from serve_llm.server.schema.completions import CompletionRequest
from serve_llm.server.storage.storage import Storage
from support.asgi import Reply, fetch
from support.fakes import ScriptedEngine, logprobs_of, make_model_info
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


def test_without_max_tokens_the_limit_on_logprobs_bounds_the_length(serve: Serve) -> None:
    served = serve(options={"limit": "logprobs=600"})
    reply = served.chat(logprobs=True, top_logprobs=2, n=2)
    assert reply.status == 200
    assert {request.sampling.max_tokens for request in served.engine.submitted} == {100}
    refused = served.chat(logprobs=True, top_logprobs=2, n=2, max_tokens=101)
    assert refused.status == 400 and refused.json()["error"]["param"] == "logprobs"


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
        (["one", {"type": "text", "text": "two"}], "one\ntwo"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "I cannot."}], "I cannot."),
        ([{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}], "Yes."),
        ([{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "Yes."}], "Yes."),
    ],
)
def test_contents(served: Served, content: object, text: str) -> None:
    assert served.chat(messages=[{"role": "user", "content": content}]).status == 200
    assert prompt_text(served).startswith(f"<|user|>\n{text}<|end|>")


def test_every_role_and_extra_message_fields_reach_the_template(model: ServedModel) -> None:
    source = (
        "{% for m in messages %}{{ m.role }}={{ m.content }}/{{ m.name }}/{{ m.tool_calls | default([]) | length }};"
        "{% endfor %}{{ mood }}"
    )
    engine = ScriptedEngine(lambda request: [40])
    custom = ServedModel.load(model.directory, make_options("demo", chat_template=source))
    app, *_ = create_app(Replicas([engine]), custom, make_options("demo"), Storage(None, None))
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d", "name": "Ann"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
        {"role": "tool", "content": "t", "tool_call_id": "1"},
        {"role": "ipython", "content": "i"},
    ]
    body = {"messages": messages, "max_tokens": 1, "chat_template_kwargs": {"mood": "good"}}
    assert fetch(app, "POST", "/v1/chat/completions", body).status == 200
    text = model.tokenizer.decode(engine.submitted[0].prompt_ids)
    assert text == "system=s//0;developer=d/Ann/0;user=u//0;assistant=None//1;tool=t/f/0;ipython=i//0;good"


def test_continuing_the_final_message(served: Served) -> None:
    talk = [*HI, {"role": "assistant", "content": "def "}]
    assert served.chat(messages=talk, continue_final_message=True).status == 200
    assert prompt_text(served).endswith("<|assistant|>\ndef ")
    both = served.chat(messages=talk, continue_final_message=True, add_generation_prompt=True)
    assert (both.status, both.json()["error"]["param"]) == (400, "continue_final_message")
    assert served.chat(add_generation_prompt=False).status == 200
    assert prompt_text(served).endswith("hi<|end|>\n")


def test_no_top_logprobs_are_no_logprobs(serve: Serve) -> None:
    served = serve()
    for fields in ({"logprobs": False, "top_logprobs": 0}, {"top_logprobs": 0}):
        assert completion(served.chat(max_tokens=2, **fields)).choices[0].logprobs is None


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


def test_usage_with_token_ids(served: Served) -> None:
    found = completion(served.chat(max_tokens=2, return_token_ids=True, prompt_logprobs=0))
    assert found.choices[0].token_ids == served.ids(TEXT)[:2]
    assert found.prompt_token_ids == served.engine.submitted[0].prompt_ids
    assert len(found.prompt_logprobs) == found.usage.prompt_tokens
    assert found.usage.prompt_tokens_details.cached_tokens == 0


def test_the_first_event_of_a_choice_describes_the_prompt(served: Served) -> None:
    found = events(served.chat(max_tokens=2, return_token_ids=True, prompt_logprobs=0, n=2, stream=True))
    for index in range(2):
        first, *others = [event for event in found if event.choices[0].index == index]
        assert first.prompt_token_ids == served.engine.submitted[0].prompt_ids
        assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
        assert all(event.prompt_token_ids is event.prompt_logprobs is None for event in others)


def test_continuous_usage_begins_before_the_first_token(served: Served) -> None:
    options = {"continuous_usage_stats": True}
    found = events(served.chat(max_tokens=3, stream=True, stream_options=options))
    assert [event.usage.completion_tokens for event in found] == [0, 1, 2, 3]
    found = events(served.chat(max_tokens=3, n=2, stream=True, stream_options=options))
    shown = [event.usage.completion_tokens for event in found]
    assert shown == sorted(shown) and (shown[0], shown[-1]) == (0, 6)


def test_a_token_without_text_has_no_event(served: Served) -> None:
    """OpenAI sends no event with an empty delta, except for the last one."""
    options = {"continuous_usage_stats": True}
    held = {"stop": f"{TEXT[:12]}~", "max_tokens": 8, "stream_options": options}  # the first text may begin the string
    found = events(served.chat(**held, stream=True))
    deltas = [event.choices[0].delta for event in found]
    assert deltas[0].role == "assistant" and all(delta.content for delta in deltas[1:])
    shown = [event.usage.completion_tokens for event in found]
    assert shown[0] == 0 and shown[1] > 1 and shown[-1] == 8
    with_logprobs = events(served.chat(**held, logprobs=True, stream=True))
    assert with_logprobs[0].choices[0].logprobs is None


FUNCTION = {"type": "function", "function": {"name": "f"}}


def assistant(*calls: object, **fields: object) -> dict[str, object]:
    return {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}]}


def call(arguments: object) -> dict[str, object]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


BAD: list[tuple[dict[str, object], str, str | None]] = [
    ({"messages": []}, "messages", None),
    ({"messages": None}, "messages", None),
    ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role", None),
    ({"messages": [{"role": "a" * 65, "content": "x"}]}, "messages[0].role", None),
    ({"messages": [{"role": "user|>", "content": "x"}]}, "messages[0].role", None),
    ({"messages": [{"role": "user", "content": [{"type": "refusal", "text": "x"}]}]},
     "messages[0].content[0].refusal", None),
    ({"messages": [{"role": "user", "content": ["x", 3]}]}, "messages[0].content", None),
    ({"messages": [*HI, {"content": "x"}]}, "messages[1].role", None),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", None),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "messages[0].content[0]", "unsupported"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", None),
    ({"messages": HI * 10_001}, "messages", None),
    ({"messages": [{"role": "user", "content": "x " * 5000}]}, "messages", "context_length_exceeded"),
    ({"tools": [FUNCTION]}, "tools", "unsupported"),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"functions": [{}]}, "functions", "unsupported"),
    ({"function_call": "auto"}, "function_call", "unsupported"),
    ({"tools": [FUNCTION, FUNCTION], "tool_choice": "none"}, "tools[1].function.name", None),
    ({"tools": [FUNCTION] * 257}, "tools", None),
    ({"tools": [{"type": "web_search"}]}, "tools[0]", "unsupported"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", None),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", None),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters.type", None),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters",
     None),
    ({"tools": [FUNCTION], "tool_choice": "sometimes"}, "tool_choice", None),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice.function.name", None),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", None),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.function", None),
    ({"tools": [FUNCTION], "tool_choice": 1}, "tool_choice", None),
    ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools.tools", None),
    (assistant(call("{1")), "messages[1].tool_calls[0].function.arguments", None),
    (assistant(call("{}"), call("[1]")), "messages[1].tool_calls[1].function.arguments", None),
    (assistant(call('{"a": NaN}')), "messages[1].tool_calls[0].function.arguments", None),
    (assistant(call(3)), "messages[1].tool_calls[0].function.arguments", None),
    (assistant({"id": "1"}), "messages[1].tool_calls[0].function.name", None),
    (assistant(reasoning=3), "messages[1].reasoning", None),
    ({"reasoning_effort": "huge"}, "reasoning_effort", None),
    ({"thinking_token_budget": -2}, "thinking_token_budget", None),
    ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported"),
    ({"response_format": {"type": "structural_tag"}}, "response_format", None),
    ({"response_format": {"type": "structural_tag", "format": {"type": "token"}}}, "response_format", None),
    ({"response_format": {"type": "structural_tag", "json_schema": {"name": "x", "schema": {}}}},
     "response_format.json_schema", None),
    ({"response_format": {"type": "text", "format": {"type": "any_text"}}}, "response_format.format", None),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name", None),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", None),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", None),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs", None),
    ({"structured_outputs": {}}, "structured_outputs", None),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", None),
    ({"structured_outputs": {"regex": "a\0"}}, "structured_outputs.regex", None),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", None),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", None),
    ({"structured_outputs": {"structural_tag": ""}}, "structured_outputs.structural_tag", None),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", None),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", None),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", None),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", None),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort", None),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
     "output_config.format.schema", None),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema", None),
    ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display", None),
    ({"thinking": {"type": "adaptive", "display": "omitted"}, "include_reasoning": True}, "thinking", None),
    ({"moderation": {}}, "moderation", "unsupported"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning", None),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", None),
    ({"reasoning": {"depth": 1}}, "reasoning.depth", None),
    ({"thinking": {"type": "deeply"}}, "thinking.type", None),
    ({"thinking": True, "enable_thinking": False}, "thinking", None),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_token_budget": 6}, "thinking", None),
    ({"top_logprobs": 2}, "top_logprobs", None),
    ({"logprobs": False, "top_logprobs": 1}, "top_logprobs", None),
    ({"top_logprobs": -1}, "top_logprobs", None),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
    ({"logprobs": 1}, "logprobs", None),
    ({"max_completion_tokens": -1}, "max_completion_tokens", None),
    ({"best_of": 2}, "best_of", "unsupported"),
    ({"prompt": "x"}, "prompt", "unsupported"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "code"), BAD, ids=lambda value: str(value)[:50])
def test_a_bad_field_is_named(served: Served, body: dict[str, object], param: str, code: str | None) -> None:
    reply = served.chat(**body)
    error = reply.json()["error"]
    assert (reply.status, error["param"], error["code"]) == (400, param, code), error
    assert served.engine.submitted == []


def test_fields_without_effect_are_accepted(served: Served) -> None:
    nothing = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "functions": None}
    assert served.chat(**nothing, parallel_tool_calls=True, max_tokens=1).status == 200


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"reasoning_effort": "none"}, "none/False/False"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "low/True/True"),
        ({"reasoning": {"enabled": False}}, "-/False/False"),
        ({"enable_thinking": True}, "-/True/True"),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, "high/False/False"),
        ({"thinking": {"type": "adaptive"}}, "-/-/-"),
        ({"thinking": False, "chat_template_kwargs": {"thinking": 7}}, "-/False/7"),
    ],
    ids=str,
)
def test_every_way_to_ask_for_reasoning(
    model: ServedModel, serve: Serve, body: dict[str, object], expected: str
) -> None:
    source = "{{ reasoning_effort or '-' }}/{{ enable_thinking | default('-') }}/{{ thinking | default('-') }}"
    served = serve(served_model=ServedModel.load(model.directory, make_options("demo", chat_template=source)))
    assert served.chat(max_tokens=1, **body).status == 200
    assert prompt_text(served) == expected


def test_the_operator_sets_variables_of_the_template(model: ServedModel, serve: Serve) -> None:
    options = {"chat_template": "{{ thinking }}{{ mood }}", "default_chat_template_kwargs": {"thinking": 0, "mood": 1}}
    served = serve(served_model=ServedModel.load(model.directory, make_options("demo", **options)))
    for body in ({}, {"chat_template_kwargs": {"mood": 2}}, {"reasoning_effort": "high"}):
        assert served.chat(max_tokens=1, **body).status == 200
    prompts = [model.tokenizer.decode(request.prompt_ids) for request in served.engine.submitted]
    assert prompts == ["01", "02", "True1"]


def test_openais_whole_schema_is_known(served: Served) -> None:
    """Each field of OpenAI's chat request is served, has no effect, or is refused by name with an error code."""
    neutral = {"modalities": ["text"], "audio": None, "prediction": {"content": "x"}, "functions": [],
               "verbosity": "low", "prompt_cache_retention": "24h", "function_call": "none", "moderation": None,
               "prompt_cache_options": {"mode": "auto"}, "web_search_options": None, "response_format": None,
               "reasoning_effort": "low", "stream_options": None}  # fmt: skip
    assert served.chat(**neutral, max_tokens=1).status == 200
    names = set(CompletionCreateParamsBase.__annotations__)
    assert len(names) > 30 and names <= set(ChatRequest.model_fields)
    completion_names = set(TextParamsBase.__annotations__)
    assert len(completion_names) > 12 and completion_names <= set(CompletionRequest.model_fields)


def test_a_model_without_a_template_says_so(model: ServedModel) -> None:
    engine = ScriptedEngine(lambda request: [40])
    app, *_ = create_app(Replicas([engine]), replace(model, template=None), make_options("x"), Storage(None, None))
    reply = fetch(app, "POST", "/v1/chat/completions", {"messages": HI})
    assert reply.status == 400 and "--chat-template" in reply.json()["error"]["message"]


def test_a_long_conversation_is_prepared_outside_the_event_loop(serve: Serve) -> None:
    served = serve(model_info=make_model_info(max_model_len=10**6))
    assert served.chat(messages=HI * 5000, max_tokens=1).status == 200
    assert len(served.engine.submitted[0].prompt_ids) > 10_000


@pytest.mark.parametrize(
    "kwargs",
    [
        {"messages": []},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"chat_template": "x"},
        {"mood": "good", "add_generation_prompt": None},
    ],
    ids=str,
)
def test_variables_of_the_template_that_other_fields_set(served: Served, kwargs: dict[str, object]) -> None:
    name = next(name for name in kwargs if name != "mood")
    for path in ("/v1/chat/completions", "/tokenize"):
        error = served.post(path, {"messages": HI, "chat_template_kwargs": kwargs}).json()["error"]
        assert error["param"] == f"chat_template_kwargs.{name}" and name in error["message"]
    same = {"add_generation_prompt": True, "continue_final_message": False}
    assert served.chat(max_tokens=1, chat_template_kwargs=same).status == 200


def test_parts_without_a_type(served: Served) -> None:
    texts = []
    for content in ([{"text": "a"}, {"text": "b"}], [{"type": "text", "text": "a"}, "b"]):
        assert served.chat(messages=[{"role": "user", "content": content}], max_tokens=1).status == 200
        texts.append(prompt_text(served))
    assert texts[0] == texts[1]
    for part, named in (({"image_url": {"url": "x"}}, "'image_url'"), ({}, "type"), ({"text": "a", "type": 3}, "")):
        error = served.chat(messages=[{"role": "user", "content": [part]}]).json()["error"]
        assert error["param"].startswith("messages[0].content") and named in error["message"], error
