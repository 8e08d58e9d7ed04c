"""Messages, responses and forced tokens through whole processes: Anthropic's client, and engines that die."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import anthropic
import pytest

from support.agent_events import fold_message, fold_response, read_events, strip_message, strip_response
from support.daemon import Daemon
from support.streams import LIMIT, Streams
from support.tools import write_files

Json = dict[str, Any]
SMALL = ("demo", "--kv-cache-memory", "64MiB", "--max-restarts", "100")
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "pattern": "^([a-z]{3} ){250}$"}},  # some hundred tokens
    "required": ["text"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
ATTEMPTS = 10  # to start streams that are open at the same time
TALK: list[Any] = [{"role": "user", "content": "The weather in Oslo, please."}]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    files = write_files(tmp_path_factory.mktemp("agents"))
    with Daemon(*SMALL, *(word for pair in files.items() for word in pair)) as daemon:
        daemon.wait_until_serving()
        yield daemon


class EventStream(threading.Thread):
    """One stream of events. `has_begun` is set when some of a call's arguments have arrived."""

    def __init__(self, url: str, path: str, body: Json) -> None:
        super().__init__(daemon=True)
        self.has_begun = threading.Event()
        self.content = b""
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LIMIT)
        self._connection.request("POST", path, json.dumps(body | {"stream": True}))
        self.start()

    def run(self) -> None:
        num_deltas = 0
        for line in self._connection.getresponse():
            self.content += line
            num_deltas += line.startswith(
                (b"event: content_block_delta", b"event: response.function_call_arguments.delta")
            )
            if num_deltas == 5:
                self.has_begun.set()
        self.has_begun.set()
        self._connection.close()


def post(url: str, path: str, body: Json) -> Json:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LIMIT)
    connection.request("POST", path, json.dumps(body))
    found: Json = json.load(connection.getresponse())
    connection.close()
    return found


@pytest.mark.slow
def test_event_streams_go_on_when_the_engine_dies(daemon: Daemon) -> None:
    message: Json = {
        "messages": TALK,
        "max_tokens": 1400,
        "temperature": 0,
        "tools": [{"name": "note", "input_schema": NOTE}],
        "tool_choice": {"type": "tool", "name": "note"},
    }
    response: Json = {
        "input": TALK,
        "max_output_tokens": 1400,
        "temperature": 0,
        "tools": [{"type": "function", "name": "note", "parameters": NOTE}],
        "tool_choice": {"type": "function", "name": "note"},
    }
    expected = post(daemon.url, "/v1/messages", message), post(daemon.url, "/v1/responses", response)
    recoveries = daemon.metrics()["serve_llm_recovery_seconds_count"]
    streams = start_streams(daemon, {"/v1/messages": message, "/v1/responses": response})
    os.kill(daemon.engine_pid(), signal.SIGKILL)
    for stream in streams:
        stream.join(LIMIT)
    assert daemon.metrics()["serve_llm_recovery_seconds_count"] == recoveries + 1
    folded = [
        fold(read_events(stream.content)) for fold, stream in zip((fold_message, fold_response), streams, strict=True)
    ]
    (block,) = [block for block in folded[0]["content"] if block["type"] == "tool_use"]
    assert len(block["input"]["text"]) >= 900
    assert without_cache(strip_message(folded[0])) == without_cache(strip_message(expected[0]))
    assert without_cache(strip_response(folded[1])) == without_cache(strip_response(expected[1]))


def start_streams(daemon: Daemon, bodies: Mapping[str, Json]) -> list[EventStream]:
    """Start a stream for each path and stop the engine while all are open. Try again if one has ended before that."""
    for _ in range(ATTEMPTS):
        streams = [EventStream(daemon.url, path, body) for path, body in bodies.items()]
        for stream in streams:
            assert stream.has_begun.wait(LIMIT)
        engine_pid = daemon.engine_pid()
        os.kill(engine_pid, signal.SIGSTOP)
        if all(stream.is_alive() for stream in streams):
            return streams
        os.kill(engine_pid, signal.SIGCONT)
        for stream in streams:
            stream.join(LIMIT)
    raise AssertionError(f"a stream ended too early in each of {ATTEMPTS} attempts")


def without_cache(reply: Json) -> Json:
    """Drop what depends on earlier requests: how much of the prompt was cached."""
    usage = reply["usage"]
    prompt = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    return {**reply, "usage": [prompt, usage["output_tokens"]]}


def test_anthropics_client(daemon: Daemon) -> None:
    how: Json = {"model": "demo", "messages": TALK, "max_tokens": 300}
    required: Any = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    with anthropic.Anthropic(base_url=daemon.url, api_key="none", max_retries=0) as client:
        called = client.messages.create(**how, **required, extra_body={"temperature": 0})
        with client.messages.stream(**how, **required, extra_body={"temperature": 0}) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        for one in (called, final):
            (call,) = [block for block in one.content if block.type == "tool_use"]
            assert one.stop_reason == "tool_use" and call.name == "get_weather"
            assert call.input["city"] in ("Oslo", "Rome") and 1 <= call.input["days"] <= 7  # type: ignore[index]
        assert final.usage.output_tokens == called.usage.output_tokens and "input_json" in kinds
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        talk = [*TALK, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
        answer = client.messages.create(**how | {"messages": talk, "max_tokens": 5}, tools=[WEATHER])
        assert answer.stop_reason == "max_tokens"
        budget: Any = {"type": "enabled", "budget_tokens": 20}
        with client.messages.stream(**how, **required, thinking=budget) as stream:
            assert "tool_use" in [block.type for block in stream.get_final_message().content]
        counted = client.messages.count_tokens(model="demo", messages=TALK, tools=[WEATHER])
        assert counted.input_tokens == called.usage.input_tokens + (called.usage.cache_read_input_tokens or 0)
        assert [model.display_name for model in client.models.list()] == ["demo"]
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(**how | {"model": "other"})
        assert caught.value.request_id and "other" in str(caught.value)


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_tool_runner_sends_the_whole_conversation(daemon: Daemon, streams: bool) -> None:
    """It first asks the server to keep the conversation."""

    @anthropic.beta_tool
    def get_weather(city: Literal["Oslo", "Rome"]) -> str:
        """The weather of a city."""
        return f"rain in {city}"

    with anthropic.Anthropic(base_url=daemon.url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="demo",
            messages=TALK,  # type: ignore[arg-type]
            max_tokens=200,
            tools=[get_weather],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_iterations=2,
            stream=streams,
        )
        first, second = [turn.get_final_message() if streams else turn for turn in runner]
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.name == "get_weather" and call.input["city"] in ("Oslo", "Rome")
    prompts = [turn.usage.input_tokens + turn.usage.cache_read_input_tokens for turn in (first, second)]
    assert prompts[1] > prompts[0] + first.usage.output_tokens, "the second prompt has the call and its result"


@pytest.mark.slow
def test_forced_tokens_with_stop_strings_and_engines_that_die() -> None:
    """Forced tokens that are appended at once must give the text that one engine samples token by token."""
    names = {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in ("first_number", "second_number")}
    schema = {"type": "object", "properties": names, "required": [*names], "additionalProperties": False}
    bodies: list[Json] = [
        {
            "prompt": f"# {number}\nimport os\n",
            "max_tokens": 12 + 8 * (number % 4),
            "temperature": 1.0,
            "seed": number,
            "stream": number % 2 == 0,
            "structured_outputs": {"json": {"type": "array", "items": schema, "minItems": 3}},
            "include_stop_str_in_output": number % 4 < 2,
            **({"stop": [["cond_num", "first_num", 'r": 7'][number // 3 % 3]]} if number % 3 == 0 else {}),
            **({"logprobs": 1} if number % 5 == 0 else {}),
        }
        for number in range(18)
    ]
    with Daemon(*SMALL, "--no-jump-forward") as one:
        expected = Streams(one.wait_until_serving(), bodies).finish()
    assert not expected.errors, expected.messages
    assert {"cond_num", "first_num"} <= expected.stop_reasons
    with Daemon(*SMALL, "-dp", "2") as daemon:
        assert Streams(daemon.wait_until_serving(), bodies).finish() == expected
        streams = Streams(daemon.url, bodies)
        streams.wait_for(9)
        os.kill(daemon.engine_pids()[1], signal.SIGKILL)
        assert streams.finish() == expected
