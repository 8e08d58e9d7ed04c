"""Deltas as server-sent events. The usual one, a bit of text and nothing else, is put together from prebuilt bytes.

Knows the endpoints' shapes, not the transport.
"""

from __future__ import annotations

import msgspec

from serve_llm.server.errors import RequestError, error_body
from serve_llm.server.reply.delta import Delta, TokenCounts
from serve_llm.server.reply.shape import Event, Head, Shape, usage_of

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

    def encode(self, deltas: list[Delta], counts: TokenCounts | None) -> bytes:
        """The events for what is new. `counts` is needed for continuous usage only."""
        if self._continuous:
            return b"".join(self._event(delta, counts) for delta in deltas)
        events = []
        for delta in deltas:
            if self._shape.is_plain(delta):
                if delta.text:  # else nothing is certain yet
                    events.append(self._start(delta.index) + _json(delta.text) + self._after)
            else:
                events.append(self._event(delta, None))
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

    def _event(self, delta: Delta, counts: TokenCounts | None) -> bytes:
        found = [self._shape.opening(self._head, delta) if delta.first else None, self._shape.event(self._head, delta)]
        lines = []
        for event in found:
            if event is None:
                continue
            if counts is not None:
                event.usage = usage_of(counts)
            elif self._include_usage:
                event.usage = None
            lines.append(_line(event))
        return b"".join(lines)


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
