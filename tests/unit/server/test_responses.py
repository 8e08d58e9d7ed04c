"""POST /v1/responses and /v1/responses/input_tokens on a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.schema.responses import ResponseEvent, ResponseReply
from serve_llm.server.structured_output.lark_regex import translate_lark
from support import agent_events
from support.agent_events import fold_response
from support.agent_events import strip_response as strip
from support.asgi import Call, Reply
from support.matrix import mostly_slow
from support.serving import Served
from support.tools import with_tools, write_call

Serve = Callable[..., Served]
ServeText = Callable[..., Served]
Json = dict[str, Any]

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
PATCH = {"type": "custom", "name": "patch", "description": "Change files.", "format": {"type": "text"}}
TOOLS = [WEATHER, {"type": "function", "name": "clock"}, PATCH]
OSLO = write_call("get_weather", city="Oslo", days=2)
THOUGHT = "<think>\nHm, a < b.\n</think>\n\n"
REQUIRED = set(
    """id object created_at completed_at status incomplete_details model previous_response_id instructions output error
    tools tool_choice truncation parallel_tool_calls text top_p temperature presence_penalty frequency_penalty
    top_logprobs reasoning usage max_output_tokens max_tool_calls store background service_tier metadata
    safety_identifier prompt_cache_key prompt_cache_retention conversation moderation prompt user""".split()
)
FUNCTION: Json = {"description": None, "parameters": None, "strict": None}  # as the reply repeats a tool
REPEATED = [{**FUNCTION, **WEATHER}, {**FUNCTION, **TOOLS[1]}, PATCH]


@pytest.fixture
def serve_text(serve: Serve, model: ServedModel) -> ServeText:
    def make(text: str, **more: Any) -> Served:
        return serve(text + "<|end|>", **{"served_model": with_tools(model), "model_info": None, **more})

    return make


def ask(served: Served, **fields: Any) -> Reply:
    return served.post("/v1/responses", {"input": "Hello", **fields})


def read_body(reply: Reply) -> Json:
    assert reply.status == 200, reply.content
    ResponseReply.model_validate(reply.json())
    body = dict(reply.json())
    assert body.keys() == REQUIRED
    return body


def read_events(reply: Reply) -> list[Json]:
    events = agent_events.read_events(reply.content)
    for event in events:
        ResponseEvent.model_validate(event)
    return events


def fold(events: list[Json]) -> Json:
    response = fold_response(events)
    assert response.keys() == REQUIRED
    return response


def prompt_text(served: Served) -> str:
    return served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


CASES: list[tuple[str, list[str]]] = [
    ("Hello.", ["message"]),
    ("", []),
    (OSLO, ["function_call"]),
    (THOUGHT + "Hello.", ["reasoning", "message"]),
    (
        f"{THOUGHT}I look.\n{OSLO}\n{write_call('patch', input='a b')}",
        ["reasoning", "message", "function_call", "custom_tool_call"],
    ),
]


@pytest.mark.parametrize("tokens_per_step", mostly_slow([1, 7, 1000], [7]))
@pytest.mark.parametrize(("written", "kinds"), CASES, ids=range(len(CASES)))
def test_stream_folds_to_the_body(serve_text: ServeText, written: str, kinds: list[str], tokens_per_step: int) -> None:
    served = serve_text(written, tokens_per_step=tokens_per_step)
    body = read_body(ask(served, tools=TOOLS))
    assert strip(fold(read_events(ask(served, tools=TOOLS, stream=True)))) == strip(body)
    assert [item["type"] for item in body["output"]] == kinds
    assert body["status"] == "completed" and body["id"].startswith("resp_")
    assert body["usage"]["input_tokens"] == len(served.engine.submitted[-1].prompt_ids)
    written_ids = served.model.tokenizer.encode(written + "<|end|>", add_special_tokens=False)
    assert body["usage"]["output_tokens"] == len(written_ids)


@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
@pytest.mark.parametrize(("written", "kinds"), CASES, ids=range(len(CASES)))
def test_logprobs_of_messages(serve_text: ServeText, written: str, kinds: list[str], tokens_per_step: int) -> None:
    served = serve_text(written, tokens_per_step=tokens_per_step)
    fields = {"tools": TOOLS, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    body = read_body(ask(served, **fields))
    events = read_events(ask(served, stream=True, **fields))
    assert strip(fold(events)) == strip(body) and body["top_logprobs"] == 2
    for item in body["output"]:
        if item["type"] != "message":
            continue
        (part,) = item["content"]
        text = b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode()
        assert text.strip() == part["text"]  # the tokens of whitespace at delimiters are listed too
        assert all(one["logprob"] < 0 and len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    streamed = [one for event in events if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    done = [one for event in events if event["type"] == "response.output_text.done" for one in event["logprobs"]]
    assert streamed == done
    assert bool(done) == ("message" in kinds)


def test_items(serve_text: ServeText) -> None:
    served = serve_text(f"{THOUGHT}I look.\n{OSLO}\n{write_call('patch', input='a b')}")
    body = read_body(ask(served, tools=TOOLS, include=["reasoning.encrypted_content"]))
    reasoning, message, call, custom = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm, a < b."}]
    assert base64.b64decode(reasoning["encrypted_content"]).decode() == "Hm, a < b."
    assert message["content"] == [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"city": "Oslo", "days": 2})
    assert (custom["name"], custom["input"]) == ("patch", "a b")
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_items_can_be_sent_back(serve_text: ServeText) -> None:
    served = serve_text(f"{THOUGHT}I look.\n{OSLO}\n{write_call('patch', input='a b')}")
    output = read_body(ask(served, tools=TOOLS))["output"]
    results = [
        {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "Rain."},
        {"type": "custom_tool_call_output", "call_id": output[3]["call_id"], "output": "Done."},
        {"role": "user", "content": [{"type": "input_text", "text": "Go on"}]},
    ]
    reply = ask(served, input=[{"role": "user", "content": "Hi"}, *output, *results], tools=TOOLS)
    assert reply.status == 200, reply.content
    prompt = prompt_text(served)
    assert "<think>\nHm, a < b.\n</think>\n\nI look." in prompt and OSLO in prompt
    assert write_call("patch", input="a b") in prompt
    assert "<|tool|>\nRain." in prompt and "<|tool|>\nDone." in prompt and "<|user|>\nGo on" in prompt


def test_encrypted_reasoning_is_read_back(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    secret = base64.b64encode(b"Which city?").decode()
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": secret},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Oslo?"}]},
        {"role": "user", "content": "Yes"},
    ]
    assert ask(served, input=items).status == 200
    assert "<think>\nWhich city?\n</think>" in prompt_text(served)


def test_instructions_and_developer_messages_become_one_system_message(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    items = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    assert read_body(ask(served, instructions="Be brief.", input=items))["instructions"] == "Be brief."
    prompt = prompt_text(served)
    assert "Be brief.\n\nBe kind." in prompt and prompt.count("<|system|>") == 1


def test_incomplete(serve_text: ServeText) -> None:
    served = serve_text("one two three four")
    body = read_body(ask(served, max_output_tokens=2))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert strip(fold(read_events(ask(served, max_output_tokens=2, stream=True)))) == strip(body)
    call = read_body(ask(serve_text(OSLO), tools=TOOLS, max_output_tokens=25))["output"][0]
    assert call["status"] == "incomplete" and OSLO.find(call["arguments"]) > 0


def test_the_reply_repeats_the_request(serve_text: ServeText) -> None:
    format = {"type": "json_schema", "name": "empty", "schema": {"type": "object", "additionalProperties": False}}
    body = read_body(
        ask(
            served := serve_text("{}"),
            tools=TOOLS,
            tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]},
            text={"format": {**format, "strict": True}, "verbosity": "low"},
            reasoning={"effort": "low", "summary": "auto"},
            metadata={"a": "b"},
            store=True,
            temperature=0.5,
        )
    )
    assert body["tools"] == REPEATED and body["metadata"] == {"a": "b"}
    assert body["text"] == {"format": {**format, "strict": True, "description": None}, "verbosity": "low"}
    assert (
        body["reasoning"] == {"effort": "low", "summary": "auto"}
        and body["store"] is False
        and body["temperature"] == 0.5
    )
    assert served.engine.submitted[-1].sampling.grammar


def test_what_include_cannot_add_is_named(serve_text: ServeText) -> None:
    include = ["reasoning.encrypted_content", "file_search_call.results", "message.output_text.logprobs", "nonsense.x"]
    reply = ask(serve_text("Hello."), include=include)
    assert reply.status == 200 and reply.headers["x-ignored-fields"] == "include[1], include[3]"


def test_hosted_tools_and_unknown_fields_are_named(serve_text: ServeText) -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: %json {}"}
    tools = [WEATHER, {"type": "web_search"}, {**PATCH, "format": lark}]
    reply = ask(serve_text("Hello."), tools=tools, client_metadata={"a": 1})
    assert reply.headers["x-ignored-fields"] == "client_metadata, tools[1], tools[2].format"


CALCULATOR = {
    "type": "namespace",
    "name": "mcp__calc",
    "description": "Arithmetic.",
    "tools": [
        {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}},
        {"type": "custom", "name": "run"},
    ],
}


def test_tools_of_a_namespace(serve_text: ServeText) -> None:
    """Codex groups the tools of each MCP server, and looks up calls by both names."""
    written = f"{write_call('mcp__calc__add', a=1)}\n{write_call('mcp__calc__run', input='1+1')}\n{write_call('clock')}"
    served = serve_text(written)
    reply = ask(served, tools=[*TOOLS, CALCULATOR])
    assert "x-ignored-fields" not in reply.headers
    body = read_body(reply)
    named = [(item["type"], item.get("namespace"), item["name"]) for item in body["output"]]
    assert named == [
        ("function_call", "mcp__calc", "add"),
        ("custom_tool_call", "mcp__calc", "run"),
        ("function_call", None, "clock"),
    ]
    assert body["tools"] == [*REPEATED, CALCULATOR]
    assert "Arithmetic.\\n\\nAdds." in prompt_text(served)
    events = read_events(ask(serve_text(written), tools=[*TOOLS, CALCULATOR], stream=True))
    assert strip(fold(events)) == strip(body)
    reply = ask(served, input=[{"role": "user", "content": "Hi"}, *body["output"]], tools=[*TOOLS, CALCULATOR])
    assert reply.status == 200 and written in prompt_text(served)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"clock", "mcp__calc__add", "mcp__calc__run"}),
        ({"type": "function", "namespace": "mcp__calc", "name": "add"}, {"mcp__calc__add"}),
        ({"type": "custom", "name": "mcp__calc__run"}, {"mcp__calc__run"}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "mcp__calc"}]},
            {"mcp__calc__add", "mcp__calc__run"},
        ),
    ],
)
def test_choosing_among_tools_of_a_namespace(serve_text: ServeText, choice: object, names: set[str]) -> None:
    served = serve_text("Hello.")
    tools = [{"type": "function", "name": "clock"}, CALCULATOR]
    assert ask(served, tools=tools, tool_choice=choice).status == 200
    grammar = served.engine.submitted[-1].sampling.grammar
    assert {name for name in ("clock", "mcp__calc__add", "mcp__calc__run") if name in grammar} == names


def test_a_lark_grammar_without_recursion_is_enforced(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: line+\nline: /[a-z]+/ LF\n%import common.LF"}
    reply = ask(served, tools=[{**PATCH, "format": lark}], tool_choice="required")
    assert reply.status == 200 and "x-ignored-fields" not in reply.headers
    pattern = f"^(?:{translate_lark(str(lark['definition']))})$"
    assert json.dumps(pattern)[1:-1] in served.engine.submitted[-1].sampling.grammar
    assert "Lark grammar" in prompt_text(served)


def test_input_tokens(serve_text: ServeText) -> None:
    served = serve_text("Hello.")
    assert ask(served, tools=TOOLS).status == 200
    reply = served.post("/v1/responses/input_tokens", {"input": "Hello", "tools": TOOLS})
    count = len(served.engine.submitted[-1].prompt_ids)
    assert reply.json() == {"object": "response.input_tokens", "input_tokens": count}


def test_an_engine_that_fails_ends_the_stream(serve_text: ServeText) -> None:
    served = serve_text("Hello, world.", automatic=False)

    async def scenario() -> Reply:
        call = Call(served.app, "POST", "/v1/responses", {"input": "Hello", "stream": True})
        while not served.engine.submitted:
            await served.engine.changed.wait()
        served.engine.step()
        await call.news.wait()
        served.engine.fail("gone")
        return await call.reply()

    last = read_events(asyncio.run(scenario()))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed" and last["response"]["error"]["message"] == "gone"


LOOKAHEAD = {"type": "grammar", "syntax": "regex", "definition": "(?=a)b"}
SETS = {
    "type": "function",
    "name": "a",
    "parameters": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    "strict": True,
}
BAD: list[tuple[Json, int, str]] = [
    ({"input": None}, 400, "input"),
    ({"input": []}, 400, "input must not be empty"),
    ({"input": [3]}, 400, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, 400, "input[0].role"),
    ({"input": [{"role": "user"}]}, 400, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 400, "input[0]"),
    ({"input": [{"type": "rocket"}]}, 400, "input[0]"),
    ({"input": [{"type": []}]}, 400, "input[0].type must be a string"),
    ({"input": [{"role": "user", "content": [{"type": {}}]}]}, 400, "input[0].content[0]: content of type {}"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "a", "arguments": '{"a": NaN}'}]}, 400, "arguments"),
    ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, 400, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "a", "arguments": "{]"}]}, 400, "arguments"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "a", "arguments": "[]"}]}, 400, "arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, 400, "input[0].output"),
    ({"input": [{"id": "msg_1"}]}, 400, "input[0]: the item is not stored here"),
    ({"conversation": "conv_1"}, 400, "conversation is not supported"),
    ({"prompt": {"id": "pmpt_1"}}, 400, "prompt is not supported"),
    ({"previous_response_id": "resp_1"}, 404, "stores no responses"),
    ({"background": True}, 400, "background"),
    ({"top_logprobs": 3}, 400, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, 400, "top_logprobs"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, 400, "max_output_tokens"),
    ({"tools": [{"type": "rocket"}]}, 400, "tools[0]"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, 400, "appears twice"),
    ({"tools": [{"type": "namespace", "tools": [WEATHER]}]}, 400, "tools[0].name is required"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "namespace"}]}]}, 400, "tools[0].tools[0]"),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, 400, "tools[0].tools[0].name"),
    (
        {"tools": [{"type": "namespace", "name": "a", "tools": [WEATHER, WEATHER]}]},
        400,
        "a__get_weather appears twice",
    ),
    ({"tools": [{"type": "namespace", "name": "a", "tools": [WEATHER] * 257}]}, 400, "257 tools"),
    ({"tools": [CALCULATOR], "tool_choice": {"type": "function", "name": "add"}}, 400, "not one of the tools"),
    (
        {"input": [{"type": "function_call", "call_id": "1", "name": "a", "namespace": 3, "arguments": "{}"}]},
        400,
        "namespace",
    ),
    ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, 400, "tools[0].format.syntax"),
    ({"tools": [{"type": "web_search"}, SETS]}, 400, "tools[1].parameters at #/properties/a: uniqueItems"),
    ({"tools": [{"type": "custom", "name": "a", "format": LOOKAHEAD}]}, 400, "tools[0].format at #/properties/input"),
    ({"tool_choice": "required"}, 400, "tool_choice needs tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "b"}}, 400, "not one of the tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, 400, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": []}}, 400, "tool_choice.tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [{"type": "namespace"}]}}, 400, "[0].name is"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, 400, "tool_choice"),
    ({"tools": [{"type": "namespace", "name": "a"}], "tool_choice": "required"}, 400, "tool_choice needs tools"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, 400, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, 400, "text.format.schema"),
    ({"temperature": 3}, 400, "temperature"),
]


@pytest.mark.parametrize(("fields", "status", "message"), BAD, ids=range(len(BAD)))
def test_bad_requests(serve_text: ServeText, fields: Json, status: int, message: str) -> None:
    reply = ask(serve_text("Hello."), **fields)
    assert reply.status == status, reply.content
    assert message in reply.json()["error"]["message"]  # type: ignore[index]
