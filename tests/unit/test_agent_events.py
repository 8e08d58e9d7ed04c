"""The checks of `support.agent_events` reject a stream in which an event is missing, repeated or out of place."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from serve_llm.server.dialects.pieces import ArgumentsPiece, CallBegin, CallEnd, ContentPiece, ReasoningPiece
from serve_llm.server.response.responses import ReplyItems
from support.agent_events import fold_message, fold_response

Json = dict[str, Any]


def build_response() -> list[Json]:
    items = ReplyItems("1", {}, encrypts_reasoning=False)
    pieces = [
        ReasoningPiece("Hm"), ReasoningPiece("."), ContentPiece("I look."), CallBegin(0, "call_1", "f"),
        ArgumentsPiece(0, '{"a":'), ArgumentsPiece(0, " 1}"), CallEnd(0),
    ]  # fmt: skip
    created: Json = {"id": "resp_1", "status": "in_progress", "output": []}
    events: list[Json] = [{"type": f"response.{name}", "response": created} for name in ("created", "in_progress")]
    for piece in pieces:
        events += items.add(piece, [])
    events += items.close()
    final = {"id": "resp_1", "status": "completed", "output": list(items.items)}
    events.append({"type": "response.completed", "response": final})
    return copy.deepcopy(events)


def number(events: list[Json]) -> list[Json]:
    return [{**event, "sequence_number": index} for index, event in enumerate(events)]


MESSAGE: list[Json] = [
    {"type": "message_start", "message": {"content": [], "stop_reason": None, "usage": {}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hi"}},
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {}},
    {"type": "message_stop"},
]


def test_a_whole_response_folds() -> None:
    assert len(fold_response(number(build_response()))["output"]) == 3


@pytest.mark.parametrize("index", range(len(build_response())))
def test_a_response_without_one_event_is_refused(index: int) -> None:
    events = build_response()
    del events[index]
    with pytest.raises((AssertionError, KeyError, StopIteration)):
        fold_response(number(events))


@pytest.mark.parametrize("index", range(2, len(build_response()) - 1))
def test_a_response_with_two_events_exchanged_is_refused(index: int) -> None:
    events = build_response()
    events[index - 1 : index + 1] = reversed(events[index - 1 : index + 1])
    with pytest.raises((AssertionError, KeyError, StopIteration)):
        fold_response(number(events))


def test_another_place_is_refused() -> None:
    for name in ("content_index", "output_index", "item_id"):
        for index, event in enumerate(build_response()):
            if name in event:
                events = build_response()
                events[index][name] = 7
                with pytest.raises(AssertionError):
                    fold_response(number(events))


def test_a_message_in_disorder_is_refused() -> None:
    assert fold_message(copy.deepcopy(MESSAGE))["content"] == [{"type": "text", "text": "Hi"}]
    ping: Json = {"type": "ping"}
    assert fold_message(copy.deepcopy([*MESSAGE[:2], ping, *MESSAGE[2:]]))
    error: Json = {"type": "error", "error": {}}
    wrong = [[ping, *MESSAGE], [*MESSAGE, ping], [*MESSAGE, error], [*MESSAGE[:3], error, *MESSAGE[3:]]]
    wrong += [MESSAGE[:index] + MESSAGE[index + 1 :] for index in range(len(MESSAGE)) if index != 2]
    for events in wrong:
        with pytest.raises((AssertionError, KeyError)):
            fold_message(copy.deepcopy(events))
