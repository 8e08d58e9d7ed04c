"""The events of /v1/messages and /v1/responses, folded into the body of a reply without streaming."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]

KINDS = {
    "message": ["response.content_part.added", "response.output_text", "response.content_part.done"],
    "reasoning": ["response.reasoning_text"],
    "function_call": ["response.function_call_arguments"],
    "custom_tool_call": ["response.custom_tool_call_input"],
}


def read_events(content: bytes) -> list[Json]:
    """The events of a whole stream."""
    events = []
    for text in content.decode().removesuffix("\n\n").split("\n\n"):
        kind, data = text.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        events.append(event)
    return events


def fold_message(events: list[Json]) -> Json:
    """The body from the events of a message, whose order it checks."""
    first, *rest = [event for event in events if event["type"] != "ping"]
    assert first["type"] == "message_start" and rest[-1]["type"] == "message_stop"
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
    return message


def strip_message(message: Json) -> Json:
    """Without what differs from one request to the next."""
    message = {**message, "id": ""}
    message["content"] = [{**block, "id": ""} if block["type"] == "tool_use" else block for block in message["content"]]
    return message


def fold_response(events: list[Json]) -> Json:
    """The final response, after a check that the events before it tell the same, in order."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, in_progress, *rest, last = events
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["status"] == "in_progress" and created["response"]["output"] == []
    items: list[Json] = []
    texts: list[str] = []
    is_open = False
    for event in rest:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert not is_open and event["output_index"] == len(items)
            is_open = True
            texts = []
            items.append(event["item"])
            continue
        item = items[-1]
        assert is_open and event["output_index"] == len(items) - 1
        if kind == "response.output_item.done":
            assert event["item"]["id"] == item["id"]
            items[-1] = event["item"]
            is_open = False
            continue
        assert event["item_id"] == item["id"]
        assert any(kind.startswith(prefix) for prefix in KINDS[item["type"]])
        if kind.endswith(".delta"):
            texts.append(event["delta"])
        elif not kind.startswith("response.content_part"):
            name = next(name for name in ("text", "arguments", "input") if name in event)
            assert event[name] == "".join(texts)
    response: Json = last["response"]
    assert not is_open and response["output"] == items and response["id"] == created["response"]["id"]
    assert last["type"] == f"response.{response['status']}"
    return response


def strip_response(response: Json) -> Json:
    """Without what differs from one request to the next."""
    output = [
        {**item, "id": item["id"].split("_")[0], **({"call_id": ""} if "call_id" in item else {})}
        for item in response["output"]
    ]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": output}
