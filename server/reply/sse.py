"""Deltas as server-sent events. The usual one, a bit of text and nothing else, is put together from prebuilt bytes.

Knows the endpoints' shapes, not the transport.
"""

from __future__ import annotations

import msgspec

from serve_llm.server.errors import RequestError, error_body
from serve_llm.server.reply.delta import Delta, TokenCounts
from serve_llm.server.reply.shape import Event, Head, Shape, usage_of
from serve_llm.server.reply.slices import Turns, choice_fields, is_long

DONE = b"data: [DONE]\n\n"

_json = msgspec.json.Encoder().encode


class Events:
    """One stream's events. `include_usage`: a last one with the usage, and null in the others, as OpenAI does it;
    `continuous_usage`: the usage so far in every one."""

    def __init__(self, shape: Shape, head: Head, include_usage: bool, continuous_usage: bool) -> None:
        self._shape = shape
        self._head = head
        self._include_usage = include_usage
        self._continuous = continuous_usage
        self._before, self._after = _templates(shape, head, include_usage)
        self._starts: dict[int, bytes] = {}  # by choice

    async def encode(self, deltas: list[Delta], counts: TokenCounts | None) -> bytes:
        """The events for what is new. `counts` is needed for continuous usage only."""
        events, turns = [], Turns()
        for delta in deltas:
            if self._continuous or not self._shape.is_plain(delta):
                events.append(await self._event(delta, counts, turns))
            elif delta.text:  # else nothing is certain yet
                events.append(self._start(delta.index) + _json(delta.text) + self._after)
            await turns.pause()
        return b"".join(events)

    def end(self, counts: TokenCounts) -> bytes:
        """What follows the last delta."""
        if not self._include_usage:
            return DONE
        last = self._shape.event(self._head, None)
        last.usage = usage_of(counts)
        return _line(last) + DONE

    @staticmethod
    def error(error: RequestError) -> bytes:
        """The end of a stream that fails."""
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def _start(self, index: int) -> bytes:
        start = self._starts.get(index)
        if start is None:
            start = self._starts[index] = self._before % index
        return start

    async def _event(self, delta: Delta, counts: TokenCounts | None, turns: Turns) -> bytes:
        opening = self._shape.opening(self._head, delta) if delta.first else None
        long = is_long(delta)
        event = self._shape.event(self._head, None if long else delta)
        for one in (event, opening):
            if one is not None and counts is not None:
                one.usage = usage_of(counts)
            elif one is not None and self._include_usage:
                one.usage = None
        start = b"" if opening is None else _line(opening)
        if not long:
            return start + _line(event)
        fields = event.model_dump(exclude_unset=True)
        fields["choices"] = [
            await choice_fields(lambda part: self._shape.event(self._head, part).choices[0], delta, turns)
        ]
        return start + b"data: " + _json(fields) + b"\n\n"


def _line(event: Event) -> bytes:
    return b"data: " + event.model_dump_json(exclude_unset=True).encode() + b"\n\n"


def _templates(shape: Shape, head: Head, include_usage: bool) -> tuple[bytes, bytes]:
    """The bytes before the text, with %d for the choice's index, and those after it."""
    without_choices = shape.event(head, None).model_dump_json(exclude_unset=True).encode()
    before, found, after = without_choices.rpartition(b'"choices":[')
    start, end = shape.plain
    usage = b',"usage":null' if include_usage else b""
    prefix = b"data: " + before.replace(b"%", b"%%") + found + b'{"index":%d,' + start
    return prefix, end + after[:-1] + usage + b"}\n\n"
