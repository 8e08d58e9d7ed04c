"""Many requests at once, each in a thread: streamed or not, greedy or sampled, with everything that can hold text
back. Their complete outcome can be compared with another run."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

from support.tools import TOOLS

LIMIT = 240.0  # seconds; more than enough on a busy machine
PROMPTS = ("class Stack:\n    def __init__(self", "import os\n", "def main():\n    ", "for item in items:\n", "x = [")
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
}
CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"json": RECORD},
    {"regex": "[a-z ]{40,60}"},
    {
        "structural_tag": {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<call>"],
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<call>",
                        "content": {"type": "json_schema", "json_schema": RECORD},
                        "end": "</call>",
                    }
                ],
                "at_least_one": True,
            }
        }
    },
)


def mixed(count: int = 32, longest: int = 600) -> list[dict[str, Any]]:
    """Return bodies of completions for the demo model. Each has a seed or is greedy, so that it can be repeated.

    The last one has `longest` tokens, so that even a fast engine is still busy with it when a slow test kills it.
    """
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        body: dict[str, Any] = {
            "prompt": f"# {number}\n{PROMPTS[number % len(PROMPTS)]}",
            "max_tokens": 20 + 5 * (number % 9),
            "stream": number % 3 != 0,
        }
        body |= [{"temperature": 0}, {"temperature": 1.0, "seed": number}, {"temperature": 0.7, "seed": number}][
            number % 3
        ]
        if number % 4 == 1:
            body |= {"n": 2, "presence_penalty": 0.5}
        if number % 5 == 2:
            body |= {"logprobs": 2}
        if number % 7 == 3:
            body |= {"stop": ["self.", "\n\n\n", "retur"]}
        else:
            body |= {"ignore_eos": True}
        if number % 4 == 2:
            body.pop("ignore_eos", None)
            body |= {"structured_outputs": CONSTRAINTS[number // 4 % len(CONSTRAINTS)], "n": 1 + number // 4 % 2}
        bodies.append(body)
    bodies[-1] |= {"max_tokens": longest, "ignore_eos": True, "stop": []}
    return bodies


def chats(count: int = 12) -> list[dict[str, Any]]:
    """Return bodies of chat completions with required calls, optional calls, a schema, and a budget of reasoning."""
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"{number} The weather in Oslo, please."}],
            "max_tokens": 30 + 5 * number,
            "stream": number % 3 != 0,
            "temperature": 1.0,
            "seed": number,
        }
        if number % 4 == 2:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "record", "schema": RECORD}}
        else:
            body["tools"] = TOOLS
            body["tool_choice"] = "auto" if number % 4 == 1 else "required"
            body["parallel_tool_calls"] = number % 8 == 0
        if number % 4 == 3:
            body |= {"chat_template_kwargs": {"opens": True}, "thinking_token_budget": 10, "logprobs": True}
        bodies.append(body)
    return bodies


class Streams:
    """Requests sent at once, to chat completions if they have messages, otherwise to completions."""

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]], patiently: bool = False) -> None:
        """patiently: resend requests that are refused because the engine is unavailable."""
        self._url = url.removeprefix("http://")
        self._patiently = patiently
        self._results: list[list[Any]] = [[] for _ in bodies]
        self._usages: list[dict[str, Any]] = [{} for _ in bodies]
        self.errors: list[int] = []  # statuses
        self.messages: list[Any] = []  # messages of errors
        self.num_characters = 0  # streamed; the same number in each run, unlike that of events
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(number, body), daemon=True) for number, body in enumerate(bodies)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, num_characters: int, stopped_pid: int | None = None) -> None:
        """Wait until this many characters have arrived and the server has admitted every request.

        stopped_pid: an engine that is stopped between these two, so that streams are still open when it is killed.

        A request whose body is still being parsed when an engine dies gets 503, as documented.
        """
        with self._changed:
            arrived = self._changed.wait_for(lambda: self.num_characters >= num_characters, LIMIT)
            assert arrived, f"{self.num_characters} of {num_characters} characters have arrived; {self.messages}"
            if stopped_pid is not None:
                os.kill(stopped_pid, signal.SIGSTOP)
            deadline = time.monotonic() + LIMIT
            while not self._are_all_admitted():
                assert time.monotonic() < deadline, "a request is not admitted"
                self._changed.wait(0.05)

    def _are_all_admitted(self) -> bool:
        ended = sum(not thread.is_alive() for thread in self._threads)
        with urllib.request.urlopen(f"http://{self._url}/status", timeout=LIMIT) as answer:
            num_open = json.load(answer)["queue"]["num_open"]
        return int(num_open) + ended >= len(self._threads)

    def finish(self) -> Streams:
        """Wait until all have ended."""
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a stream does not end"
        return self

    @property
    def stop_reasons(self) -> set[Any]:
        """Return the stop reasons of all choices."""
        return {choice.get("stop_reason") for choices in self._results for choice in choices}

    @property
    def num_tokens(self) -> int:
        """Count the tokens of all answers, by their usage."""
        return sum(usage.get("completion_tokens", 0) for usage in self._usages)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Streams) and not self.errors and not other.errors, (self.messages, other)
        for number, (mine, theirs) in enumerate(zip(self._results, other._results, strict=True)):
            assert mine == theirs, f"request {number}"
        return self._usages == other._usages

    def _run(self, number: int, body: dict[str, Any]) -> None:
        more = {"stream_options": {"include_usage": True}} if body.get("stream") else {}
        while True:
            connection = http.client.HTTPConnection(self._url, timeout=LIMIT)
            try:
                path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
                connection.request("POST", path, json.dumps(body | more))
                with connection.getresponse() as answer:
                    if answer.status == 503 and self._patiently:
                        time.sleep(0.1)
                        continue
                    if answer.status != 200:
                        self._fail(answer.status, json.loads(answer.read()))
                    elif body.get("stream"):
                        self._read_events(number, answer)
                    else:
                        whole = json.loads(answer.read())
                        self._results[number] = [_plain(choice) for choice in whole["choices"]]
                        self._usages[number] = _counts(whole["usage"])
                    return
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._fail(0, repr(error))
                return
            finally:
                connection.close()

    def _read_events(self, number: int, answer: http.client.HTTPResponse) -> None:
        choices: dict[int, dict[str, Any]] = {}
        last = b""
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            last = line.strip()
            if last == b"data: [DONE]":
                break
            event = json.loads(line[6:])
            if "error" in event:
                self._fail(500, event)
                continue
            if event.get("usage"):
                self._usages[number] = _counts(event["usage"])
            for choice in event["choices"]:
                _fold(choices.setdefault(choice["index"], {"index": choice["index"]}), choice)
            with self._changed:
                self.num_characters += sum(map(_count_characters, event["choices"]))
                self._changed.notify_all()
        if last != b"data: [DONE]":
            self._fail(0, "the stream was cut")
        self._results[number] = [choices[index] for index in sorted(choices)]

    def _fail(self, status: int, message: Any) -> None:
        with self._changed:
            self.errors.append(status)
            self.messages.append(message)


def _plain(choice: dict[str, Any]) -> dict[str, Any]:
    """Drop the ids of calls, which are random."""
    plain = {name: value for name, value in choice.items() if value is not None}
    if "message" in plain:
        calls = [call["function"] for call in plain["message"].get("tool_calls", [])]
        plain["message"] = {**plain["message"], "tool_calls": calls}
    return plain


def _counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Drop the number of cached tokens, which depends on earlier requests."""
    return {name: value for name, value in usage.items() if isinstance(value, int)}


def _count_characters(choice: dict[str, Any]) -> int:
    delta = choice.get("delta", {})
    arguments = "".join(call["function"]["arguments"] for call in delta.get("tool_calls") or [])
    texts = (choice.get("text"), delta.get("content"), delta.get("reasoning"), arguments)
    return sum(len(text or "") for text in texts)


def _fold(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    """Add an event's content to what is known of a choice."""
    if "delta" in choice:
        _fold_delta(whole.setdefault("message", {"tool_calls": []}), choice["delta"])
    else:
        whole["text"] = whole.get("text", "") + choice["text"]
    for name in ("finish_reason", "stop_reason"):
        if choice.get(name) is not None:
            whole[name] = choice[name]
    for name, values in (choice.get("logprobs") or {}).items():
        whole.setdefault("logprobs", {}).setdefault(name, []).extend(values or [])


def _fold_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning"):
        if delta.get(name):
            message[name] = message.get(name, "") + delta[name]
    calls = message["tool_calls"]
    for call in delta.get("tool_calls") or []:
        if "id" in call:
            assert call["index"] == len(calls), "calls begin in order"
            calls.append({"name": call["function"]["name"], "arguments": ""})
        assert call["index"] == len(calls) - 1
        calls[-1]["arguments"] += call["function"]["arguments"]
