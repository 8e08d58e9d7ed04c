"""Folds the events of /v1/messages and /v1/responses into the body of a non-streamed reply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

DELTA_EVENTS = {
    "message": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
"""By item type: the events about its text without their last part, and the field that holds the whole text."""


def read_events(content: bytes) -> list[Json]:
    """Read the events of a whole stream."""
    events = []
    for text in content.decode().removesuffix("\n\n").split("\n\n"):
        kind, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


def fold_message(events: list[Json]) -> Json:
    """Build the body from the events of a message, and check their order."""
    first, *rest = events
    assert first["type"] == "message_start" and rest[-1]["type"] == "message_stop"
    rest = [event for event in rest if event["type"] != "ping"]
    message: Json = first["message"]
    texts: list[str] = []
    is_open = False
    for event in rest[:-1]:
        assert message["stop_reason"] is None, "an event after the end"
        blocks = message["content"]
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                is_open = True
                texts = []
                blocks.append(event["content_block"])
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                delta = event["delta"]
                block = blocks[-1]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                elif delta["type"] == "thinking_delta":
                    block["thinking"] += delta["thinking"]
                elif delta["type"] == "signature_delta":
                    block["signature"] = delta["signature"]
                elif delta["type"] == "compaction_delta":
                    block["content"] = delta["content"]
                else:
                    texts.append(delta["partial_json"])
                    block["input"] = texts
            case "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                is_open = False
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = json.loads("".join(texts) or "{}")
            case "message_delta":
                assert not is_open
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case kind:
                raise AssertionError(f"{kind} inside of a message")
    assert message["stop_reason"] is not None
    return message


def strip_message(message: Json) -> Json:
    """Drop what differs from one request to the next."""
    message = {**message, "id": ""}
    message["content"] = [{**block, "id": ""} if block["type"] == "tool_use" else block for block in message["content"]]
    return message


def fold_response(events: list[Json]) -> Json:
    """Return the final response, after checking that the preceding events agree with it, in order."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *rest, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["status"] == "in_progress" and created["response"]["output"] == []
    items: list[Json] = []
    waiting = iter(rest)
    for event in waiting:
        assert event["type"] == "response.output_item.added" and event["output_index"] == len(items)
        items.append(_fold_item(event, waiting))
    response: Json = last["response"]
    assert response["output"] == items and response["id"] == created["response"]["id"]
    assert last["type"] == f"response.{response['status']}"
    return response


def _fold_item(added: Json, events: Iterator[Json]) -> Json:
    """Return the finished item, from the events up to its end, which must be complete and in order."""
    item = added["item"]
    kind = item["type"]
    prefix, field = DELTA_EVENTS[kind]
    has_part = kind in ("message", "reasoning")
    place = {"item_id": item["id"], "output_index": added["output_index"], **({"content_index": 0} if has_part else {})}

    def take() -> Json:
        event = next(events)
        if event["type"] != "response.output_item.done":
            assert {
                name: event.get(name) for name in ("item_id", "output_index", "content_index") if name in event
            } == place
        return event

    assert not item.get("content") and not item.get(field)
    if kind == "message":
        opened = take()
        assert opened["type"] == "response.content_part.added" and opened["part"]["text"] == ""
    texts = []
    while (event := take())["type"] == f"{prefix}.delta":
        texts.append(event["delta"])
    assert event["type"] == f"{prefix}.done" and event[field] == "".join(texts)
    part = take() if kind == "message" else None
    done = take()
    assert done["type"] == "response.output_item.done" and done["output_index"] == added["output_index"]
    finished: Json = done["item"]
    changing = ("status", "content", "encrypted_content", field)
    assert {**finished, **dict.fromkeys(changing)} == {**item, **dict.fromkeys(changing)}
    if part is not None:
        assert part["type"] == "response.content_part.done" and finished["content"] == [part["part"]]
    held = finished["content"][0]["text"] if has_part else finished[field]
    assert held == "".join(texts)
    return finished


def strip_response(response: Json) -> Json:
    """Drop what differs from one request to the next."""
    output = [
        {**item, "id": item["id"].split("_")[0], **({"call_id": ""} if "call_id" in item else {})}
        for item in response["output"]
    ]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}
