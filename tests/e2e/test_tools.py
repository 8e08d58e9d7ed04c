"""Tools through whole processes: the official client, the offline class, and an engine that dies in the middle."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from msgspec.structs import replace
from openai import OpenAI
from pydantic import BaseModel, Field

from serve_llm import LLM, SamplingParams
from support.daemon import Daemon
from support.tools import TEMPLATE, TOOLS, WEATHER, write_files

EXAMPLE = Path(__file__).parents[2] / "examples" / "tools.py"
TALK: list[Any] = [{"role": "user", "content": "The weather in Oslo, please."}]


class get_weather(BaseModel):
    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=7)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return options for the demo model: a template that shows tools, and a dialect."""
    options = write_files(tmp_path_factory.mktemp("tools"))
    return {name.removeprefix("--").replace("-", "_"): value for name, value in options.items()}


@pytest.fixture(scope="module")
def tool_server(files: dict[str, str]) -> Iterator[Daemon]:
    options = [word for name, value in files.items() for word in (f"--{name.replace('_', '-')}", value)]
    with Daemon("demo", "--kv-cache-memory", "64MiB", *options) as daemon:
        daemon.wait_until_serving()
        yield daemon


@pytest.fixture
def client(tool_server: Daemon) -> Iterator[OpenAI]:
    with OpenAI(base_url=tool_server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.slow
@pytest.mark.pairs("tools + n")
def test_parsed_arguments(client: OpenAI) -> None:
    how: dict[str, Any] = {"model": "demo", "messages": TALK, "seed": 5, "parallel_tool_calls": False}
    tools = [openai.pydantic_function_tool(get_weather)]
    parsed = client.chat.completions.parse(tools=tools, tool_choice="required", **how).choices[0]
    (call,) = parsed.message.tool_calls or []
    assert parsed.finish_reason == "tool_calls" and isinstance(call.function.parsed_arguments, get_weather)
    with client.chat.completions.stream(tools=tools, tool_choice="required", **how) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert [one.function for one in final.message.tool_calls or []] == [call.function]
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    whole = client.chat.completions.create(tools=tools, tool_choice=named, temperature=1.5, n=4, **how)
    for choice in whole.choices:
        (found,) = choice.message.tool_calls or []
        get_weather.model_validate_json(found.function.arguments)
        assert choice.finish_reason == "stop"


def test_a_conversation_with_tools(client: OpenAI) -> None:
    first = client.chat.completions.create(
        model="demo", messages=TALK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=1
    ).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.tool_calls
    answers: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in first.message.tool_calls
    ]
    talk = [*TALK, first.message, *answers]
    last = client.chat.completions.create(model="demo", messages=talk, tools=TOOLS, tool_choice="none", max_tokens=20)
    assert last.choices[0].message.content and not last.choices[0].message.tool_calls


def test_a_custom_tool(client: OpenAI) -> None:
    pattern = "[a-z]{2,6}(, [a-z]{2,6}){2}"
    grammar = {"syntax": "regex", "definition": pattern}
    custom: Any = {"name": "note", "format": {"type": "grammar", "grammar": grammar}}
    tools: Any = [{"type": "custom", "custom": custom}]
    how: dict[str, Any] = {
        "model": "demo",
        "messages": TALK,
        "seed": 1,
        "parallel_tool_calls": False,
        "tools": tools,
        "extra_body": {"thinking_token_budget": 0},
    }
    named: Any = {"type": "custom", "custom": {"name": "note"}}
    first = client.chat.completions.create(tool_choice=named, temperature=1.5, **how).choices[0]
    (call,) = first.message.tool_calls or []
    assert call.type == "custom" and re.fullmatch(pattern, call.custom.input)
    events = client.chat.completions.create(tool_choice=named, temperature=1.5, stream=True, **how)
    pieces: list[Any] = [piece for event in events for piece in event.choices[0].delta.tool_calls or []]
    assert "".join(piece.custom["input"] for piece in pieces) == call.custom.input
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "noted"}
    last = client.chat.completions.create(
        model="demo", messages=[*TALK, first.message, answer], tools=tools, tool_choice="none", max_tokens=9
    )
    assert last.choices[0].message.content


def test_example(tool_server: Daemon) -> None:
    command = [sys.executable, "-P", str(EXAMPLE), tool_server.url + "/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"get_weather\(city='.*', days=\d\) -> ", done.stdout)


@pytest.mark.slow
def test_offline(files: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serve_llm")
    params = SamplingParams(max_tokens=400, temperature=1.5, seed=1, n=8)
    opened = {"opens": True}
    with LLM("demo", kv_cache_memory="64MiB", **files) as llm:
        forced: dict[str, Any] = {
            "use_tqdm": False, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False
        }  # fmt: skip
        (called,) = llm.chat(TALK, params, **forced)
        (reasoned,) = llm.chat(TALK, params, **forced, chat_template_kwargs=opened)
        short = replace(params, thinking_token_budget=20)
        (budgeted,) = llm.chat(TALK, short, **forced, chat_template_kwargs=opened)
    assert re.search(r"dialect: json-tag \(--dialect\).*; check passed", caplog.text)
    assert all(choice.tool_calls for choice in [*called.outputs, *budgeted.outputs])
    assert all(choice.reasoning for choice in [*reasoned.outputs, *budgeted.outputs])
    assert sum(choice.finish_reason == "tool_calls" for choice in budgeted.outputs) > 4
    for choice in [*called.outputs, *reasoned.outputs, *budgeted.outputs]:
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls" and len(choice.tool_calls) == 1 and choice.text == ""
        for call in choice.tool_calls:
            if call.name == "get_weather":
                jsonschema.validate(json.loads(call.arguments), WEATHER["function"]["parameters"])


@pytest.mark.pairs("tools + replay")
def test_a_call_survives_its_engine(tool_server: Daemon, client: OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "note", "parameters": {
        "type": "object", "properties": {"text": {"type": "string", "minLength": 300, "maxLength": 400}},
        "required": ["text"], "additionalProperties": False,
    }}}  # fmt: skip

    def run(kills: bool) -> tuple[str, str]:
        name = arguments = ""
        stream = client.chat.completions.create(
            model="demo", messages=TALK, tools=[tool], tool_choice="required", parallel_tool_calls=False, seed=7,
            max_tokens=1000, stream=True,
        )  # fmt: skip
        for event in stream:
            for call in event.choices[0].delta.tool_calls or []:
                assert bool(call.id) == (not name), "the call begins once"
                name += call.function.name or ""
                arguments += call.function.arguments
            if kills and len(arguments) > 30:
                os.kill(tool_server.engine_pid(), signal.SIGKILL)
                kills = False
        assert not kills
        return name, arguments

    undisturbed = run(kills=False)
    assert run(kills=True) == undisturbed
    assert undisturbed[0] == "note" and len(json.loads(undisturbed[1])["text"]) >= 300


@pytest.mark.slow
def test_offered_tools_do_not_change_a_text_without_calls(files: dict[str, str]) -> None:
    greedy = SamplingParams(max_tokens=60, temperature=0)
    sampled = SamplingParams(max_tokens=60, temperature=1, top_p=0.9, seed=3)
    calm = "{% set tools = none %}" + TEMPLATE  # the prompt is the same
    with LLM("demo", kv_cache_memory="64MiB", dialect=files["dialect"], chat_template=calm) as llm:
        llm._model.template.__dict__["shows_tools"] = True  # type: ignore[union-attr]
        talks: list[Any] = [[{"role": "user", "content": f"{number} {TALK[0]['content']}"}] for number in range(8)]
        for params in (greedy, sampled):
            plain = llm.chat(talks, params, use_tqdm=False)
            offered = llm.chat(talks, params, use_tqdm=False, tools=TOOLS)
            assert [one.outputs[0].token_ids for one in offered] == [one.outputs[0].token_ids for one in plain]
