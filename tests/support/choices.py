"""Choices of chat completions, from bodies and from streams."""

from __future__ import annotations

from typing import Any

from serve_llm.server.schema.chat import ChatCompletion, ChatEvent
from support.asgi import Reply

Choice = dict[str, Any]


def read_body(reply: Reply) -> Choice:
    assert reply.status == 200, reply.content
    ChatCompletion.model_validate(reply.json(), extra="forbid")
    choice: Choice = reply.json()["choices"][0]
    return choice


def fold(reply: Reply, index: int = 0) -> Choice:
    """Build the choice of a body from the events of a stream."""
    assert reply.status == 200, reply.content
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, Any] = {}
    choice: Choice = {"index": index, "message": message, "logprobs": None}
    token_ids: list[int] = []
    for event in reply.events():
        ChatEvent.model_validate(event, extra="forbid")
        for part in event["choices"]:
            if part["index"] != index:
                continue
            assert "finish_reason" not in choice, "an event after the last one"
            delta = part["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for entry in delta.get("tool_calls", []):
                if "id" in entry:
                    assert entry["index"] == len(calls), "calls begin in order"
                    assert entry["function"]["name"] and entry["function"]["arguments"] == ""
                    calls[entry["index"]] = {key: entry[key] for key in ("id", "type", "function")}
                else:
                    assert entry.keys() == {"index", "function"} and entry["function"].keys() == {"arguments"}
                    assert entry["index"] == len(calls) - 1
                    calls[entry["index"]]["function"]["arguments"] += entry["function"]["arguments"]
            if part["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {"content": []}
                choice["logprobs"]["content"] += part["logprobs"]["content"]
            token_ids += part.get("token_ids", [])
            choice |= {name: part[name] for name in ("stop_reason",) if name in part}
            if part["finish_reason"] is not None:
                choice["finish_reason"] = part["finish_reason"]
    if calls:
        message["tool_calls"] = list(calls.values())
        message["content"] = message["content"] or None
    if token_ids:
        choice["token_ids"] = token_ids
    return choice
