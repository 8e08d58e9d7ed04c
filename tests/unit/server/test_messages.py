"""POST /v1/messages and /v1/messages/count_tokens on a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.schema.messages import MessageEvent, MessageReply
from support import agent_events
from support.agent_events import fold_message as fold
from support.agent_events import strip_message as strip
from support.asgi import Call, Reply
from support.fakes import make_model_info
from support.matrix import mostly_slow
from support.serving import Served
from support.tools import with_tools, write_call

Serve = Callable[..., Served]
ServeText = Callable[..., Served]
Json = dict[str, Any]

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TOOLS = [WEATHER, {"type": "custom", "name": "clock", "input_schema": {"type": "object"}}]
OSLO = write_call("get_weather", city="Oslo", days=2)
ADAPTIVE = {"type": "adaptive"}
THOUGHT = "<think>\nHm, a < b.\n</think>\n\n"


@pytest.fixture
def serve_text(serve: Serve, model: ServedModel) -> ServeText:
    def make(text: str, **more: Any) -> Served:
        return serve(text + "<|end|>", **{"served_model": with_tools(model), "model_info": None, **more})

    return make


def ask(served: Served, path: str = "/v1/messages", headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    body = {"max_tokens": 300, "messages": [{"role": "user", "content": "Hello"}], **fields}
    return served.post(path, body, headers=headers or {})


def read_events(reply: Reply) -> list[Json]:
    events = agent_events.read_events(reply.content)
    for event in events:
        MessageEvent.model_validate(event)
    return events


def read_body(reply: Reply) -> Json:
    assert reply.status == 200, reply.content
    MessageReply.model_validate(reply.json(), extra="forbid")
    return dict(reply.json())


def prompt_text(served: Served) -> str:
    return served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


def call(name: str, **arguments: object) -> Json:
    return {"type": "tool_use", "id": "", "name": name, "input": arguments}


CASES: list[tuple[str, list[str], str]] = [
    ("Hello.", ["text"], "end_turn"),
    ("", ["text"], "end_turn"),
    (OSLO, ["tool_use"], "tool_use"),
    (THOUGHT + "Hello.", ["thinking", "text"], "end_turn"),
    (f"{THOUGHT}I look.\n{OSLO}\n{write_call('clock')}", ["thinking", "text", "tool_use", "tool_use"], "tool_use"),
]


@pytest.mark.parametrize("tokens_per_step", mostly_slow([1, 7, 1000], [7]))
@pytest.mark.parametrize(("written", "kinds", "stop_reason"), CASES, ids=range(len(CASES)))
def test_stream_folds_to_the_body(
    serve_text: ServeText, written: str, kinds: list[str], stop_reason: str, tokens_per_step: int
) -> None:
    served = serve_text(written, tokens_per_step=tokens_per_step)
    body = read_body(ask(served, tools=TOOLS, thinking=ADAPTIVE))
    folded = fold(read_events(ask(served, tools=TOOLS, thinking=ADAPTIVE, stream=True)))
    assert strip(folded) == strip(body)
    assert [block["type"] for block in body["content"]] == kinds
    assert body["stop_reason"] == stop_reason and body["stop_sequence"] is None
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(served.engine.submitted[-1].prompt_ids)
    assert usage["output_tokens"] == len(served.model.tokenizer.encode(written + "<|end|>", add_special_tokens=False))


def test_blocks(serve_text: ServeText) -> None:
    written = f"{THOUGHT}I look.\n{OSLO}\n{write_call('clock')}"
    body = read_body(ask(serve_text(written), tools=TOOLS, thinking=ADAPTIVE))
    thinking, *rest = strip(body)["content"]
    assert thinking["thinking"] == "Hm, a < b." and thinking["signature"]
    assert rest == [
        {"type": "text", "text": "I look."},
        call("get_weather", city="Oslo", days=2),
        call("clock"),
    ]


def test_message_start_has_the_prompts_tokens(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    first = read_events(ask(served, stream=True))[0]
    assert first["message"]["usage"]["input_tokens"] == len(served.engine.submitted[-1].prompt_ids)


def test_batches_of_messages_are_refused_by_name(serve_text: ServeText) -> None:
    reply = serve_text("Hello.").post("/v1/messages/batches", {"requests": []})
    assert reply.status == 404 and "/v1/batches" in reply.json()["error"]["message"]


def test_stop_sequence_and_max_tokens(serve_text: ServeText) -> None:
    served = serve_text("one two three four")
    body = read_body(ask(served, stop_sequences=["three"]))
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "three")
    assert body["content"] == [{"type": "text", "text": "one two "}]
    assert read_body(ask(served, max_tokens=2))["stop_reason"] == "max_tokens"
    assert fold(read_events(ask(served, max_tokens=2, stream=True)))["stop_reason"] == "max_tokens"
    cut = read_body(ask(serve_text(OSLO), tools=TOOLS, max_tokens=25))
    assert cut["stop_reason"] == "max_tokens" and cut["content"][0]["name"] == "get_weather"


def test_the_end_of_the_context_is_told_from_max_tokens(
    serve: Serve, serve_text: ServeText, model: ServedModel
) -> None:
    served = serve(" one" * 300, served_model=with_tools(model), model_info=make_model_info(max_model_len=100))
    assert ask(served, max_tokens=1).status == 200
    room = 100 - len(served.engine.submitted[-1].prompt_ids)
    for max_tokens, reason in ((room + 1, "model_context_window_exceeded"), (room, "max_tokens")):
        assert read_body(ask(served, max_tokens=max_tokens))["stop_reason"] == reason
        assert fold(read_events(ask(served, max_tokens=max_tokens, stream=True)))["stop_reason"] == reason
    ended = serve_text("one")
    assert read_body(ask(ended, max_tokens=10**6))["stop_reason"] == "end_turn"


def test_no_tokens_compute_the_prompt_only(serve_text: ServeText) -> None:
    served = serve_text("one two", script=lambda request: [])
    body = read_body(ask(served, max_tokens=0))
    assert (body["stop_reason"], body["content"], body["usage"]["output_tokens"]) == ("max_tokens", [], 0)
    assert served.engine.submitted[-1].sampling.max_tokens == 0
    streamed = fold(read_events(ask(served, max_tokens=0, stream=True)))
    assert (streamed["stop_reason"], streamed["content"]) == ("max_tokens", [])


def test_a_top_p_of_zero_takes_the_most_likely_token(serve_text: ServeText) -> None:
    served = serve_text("one")
    assert ask(served, top_p=0).status == 200
    assert served.engine.submitted[-1].sampling.top_k == 1


def test_max_tokens_is_an_upper_bound(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    assert ask(served, max_tokens=10**6).status == 200
    request = served.engine.submitted[-1]
    assert request.sampling.max_tokens + len(request.prompt_ids) <= served.engine.model_info.max_model_len


def test_the_conversation_reaches_the_template(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Which city?", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Rain."}]},
                {"type": "text", "text": "And"},
                {"type": "text", "text": "now?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    reply = ask(served, system=system, messages=messages, tools=TOOLS)
    assert reply.status == 200, reply.content
    prompt = prompt_text(served)
    assert '"name": "get_weather"' in prompt and "Be brief.\nBe kind." in prompt
    assert "<think>\nWhich city?\n</think>" in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in prompt
    assert "<|tool|>\nRain." in prompt and "<|user|>\nAnd\nnow?" in prompt


def test_a_last_message_of_the_assistant_is_continued(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    assert ask(served, messages=messages).status == 200
    assert prompt_text(served).endswith("Well,")


def test_tool_choice(serve_text: ServeText) -> None:
    served = serve_text(OSLO)
    none = read_body(ask(served, tools=TOOLS, tool_choice={"type": "none"}))
    assert none["content"] == [{"type": "text", "text": OSLO}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
        assert read_body(ask(served, tools=TOOLS, tool_choice=choice))["stop_reason"] == "tool_use"


def test_thinking_reaches_the_template(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    assert ask(served, thinking={"type": "disabled"}).status == 200
    assert prompt_text(served).endswith("<think>\n\n</think>\n\n")
    assert ask(served, thinking={"type": "enabled", "budget_tokens": 100}).status == 200
    thinking = served.engine.submitted[-1].sampling.thinking
    assert thinking is not None and thinking.num_tokens == 100


def test_a_budget_means_nothing_to_a_model_that_does_not_reason(serve: Serve) -> None:
    reply = ask(serve("Hello."), thinking={"type": "enabled", "budget_tokens": 100})
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == "thinking.budget_tokens"


def test_output_format_constrains_the_text(serve_text: ServeText) -> None:
    served = serve_text("{}")
    format = {"type": "json_schema", "schema": {"type": "object", "additionalProperties": False}}
    assert ask(served, output_config={"format": format, "effort": "low"}).status == 200
    assert served.engine.submitted[-1].sampling.grammar


def test_ignored_fields_are_named_and_counted(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    fields = {
        "context_management": {"edits": []},
        "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}],
        "metadata": {"user_id": "x"},
    }
    reply = ask(served, **fields)
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == "context_management, tools[2]"
    assert ask(served, stream=True, **fields).headers["x-ignored-fields"] == "context_management, tools[2]"
    assert 'ignored_fields_total{model_name="demo",route="/v1/messages"} 4.0' in served.get("/metrics").content.decode()


def test_the_format_has_an_earlier_name(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    for fields in ({"output_config": {"format": FORMAT}}, {"output_format": FORMAT}):
        reply = ask(served, **fields)
        assert reply.status == 200 and "x-ignored-fields" not in reply.headers
    first, second = (request.sampling.grammar for request in served.engine.submitted)
    assert first == second != ""


def test_the_billing_header_of_claude_code_is_no_part_of_the_prompt(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    header = {
        "type": "text",
        "text": "x-anthropic-billing-header: cc_version=2.1.197.fa9; cc_entrypoint=cli; cch=00001;",
    }
    for system in ([header, {"type": "text", "text": "Be brief."}], "Be brief.", [header], None):
        assert ask(served, system=system).status == 200
    first, second, third, fourth = (request.prompt_ids for request in served.engine.submitted)
    assert first == second and third == fourth


def test_count_tokens(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    assert ask(served, tools=TOOLS, system="Be brief.").status == 200
    body = {"messages": [{"role": "user", "content": "Hello"}], "tools": TOOLS, "system": "Be brief.", "extra": 1}
    reply = served.post("/v1/messages/count_tokens", body)
    assert reply.json() == {"input_tokens": len(served.engine.submitted[-1].prompt_ids)}
    assert reply.headers["x-ignored-fields"] == "extra"


SEARCH = {"type": "web_search_20250305", "name": "web_search"}
SETS = {"name": "a", "input_schema": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}
FORMAT = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}}
BAD: list[tuple[Json, str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages must not be empty"),
    ({"messages": [{"role": "tool", "content": "x"}]}, r"messages[0].role"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "None"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": "c"}]}]},
        "tool_use block must be followed",
    ),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"system": 3}, "system"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "rocket", "name": "a"}]}, "tools[0]"),
    ({"tools": [WEATHER, WEATHER]}, "appears twice"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
    ({"tools": [SEARCH, {**SETS, "strict": True}]}, "tools[1].input_schema at #/properties/a: uniqueItems"),
    ({"tools": [SEARCH, SETS], "tool_choice": {"type": "any"}}, "tools[1].input_schema at #/properties/a"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "b"}}, "not one of the tools"),
    ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 300}}, "budget_tokens"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"temperature": 3}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences must not"),
    ({"stop_sequences": ["x"] * 129}, "stop_sequences may hold at most 128"),
    ({"stop_sequences": ["x" * 1025]}, "each string of stop_sequences"),
    ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, "exclude each other"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "nothing"}}}, "output_format.schema"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "output_config.format"),
    ({"stream": "yes"}, "stream"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=range(len(BAD)))
def test_bad_requests(serve_text: ServeText, fields: Json, message: str) -> None:
    reply = ask(serve_text("Hello."), **fields)
    assert reply.status == 400, reply.content
    body: Json = dict(reply.json())
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert message in body["error"]["message"]
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]


def test_other_errors_have_anthropics_shape(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    assert ask(served, model="other").json()["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert served.post("/v1/messages/unknown", {}).json()["error"]["type"] == "not_found_error"  # type: ignore[index]
    keyed = serve_text("Hello.", options={"api_key": ("secret",)})
    refused = ask(keyed)
    assert refused.status == 401 and refused.json()["error"]["type"] == "authentication_error"  # type: ignore[index]
    assert ask(keyed, headers={"x-api-key": "secret"}).status == 200
    assert ask(keyed, headers={"authorization": "Bearer secret", "x-api-key": "other"}).status == 200
    assert ask(keyed, headers={"x-api-key": "other"}).status == 401
    assert "x-api-key: <key>" in refused.json()["error"]["message"]  # type: ignore[index]


def test_models_answer_anthropics_clients_in_their_shape(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    error = served.get("/v1/models/other", headers={"anthropic-version": "2023-06-01"})
    assert error.status == 404 and error.json()["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert served.get("/v1/models/other").json()["error"]["code"] == "model_not_found"  # type: ignore[index]


def post_stream(served: Served) -> Call:
    body = {"max_tokens": 300, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
    return Call(served.app, "POST", "/v1/messages", body)


def test_an_engine_that_fails_ends_the_stream_with_an_error_event(serve_text: ServeText) -> None:
    served = serve_text("Hello, world.", automatic=False)

    async def scenario() -> Reply:
        call = post_stream(served)
        while not served.engine.submitted:
            await served.engine.changed.wait()
        served.engine.step()
        await call.news.wait()
        served.engine.fail("gone")
        return await call.reply()

    reply = asyncio.run(scenario())
    events = read_events(reply)
    assert reply.status == 200 and events[0]["type"] == "message_start"
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "gone"}}
