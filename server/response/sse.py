"""Encodes deltas as server-sent events. The most frequent event, which only adds text, is assembled from prebuilt
bytes."""

from __future__ import annotations

import msgspec

from serve_llm.server.generate.delta import Delta, TokenCounts
from serve_llm.server.http.errors import RequestError, error_body
from serve_llm.server.response.builder import Json, ResponseBuilder, build_metrics, build_usage, encode_json

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, which clients skip

START_SECONDS = 2.0
"""After which a stream of Messages or Responses begins without a token. An earlier error has a status of its own."""
PING_SECONDS = 10.0


class SSEEncoder:
    """Encodes the events of one stream."""

    start_seconds: float | None = None
    ping_seconds: float | None = None

    def __init__(self, builder: ResponseBuilder, include_usage: bool, continuous_usage: bool) -> None:
        """include_usage: end with an event that holds the usage; it is null in all others, as OpenAI does it.
        continuous_usage: every event holds the usage so far."""
        self.continuous_usage = continuous_usage
        self._builder = builder
        self._include_usage = include_usage
        before_index, after_text = _build_template(builder, include_usage)
        self._before_index = before_index
        self._after_text = after_text
        self._before_text: dict[int, bytes] = {}  # by index of the choice
        self._num_shown = 0  # generated tokens in the usage of the last event

    def encode(self, deltas: list[Delta], counts: TokenCounts | None) -> bytes:
        """Events for new deltas; empty if they hold no text yet. counts: needed for continuous usage only."""
        if len(deltas) == 1:  # usually
            return self._encode_delta(deltas[0], counts)
        return b"".join([self._encode_delta(delta, counts) for delta in deltas])

    def _encode_delta(self, delta: Delta, counts: TokenCounts | None) -> bytes:
        if self.continuous_usage or not self._builder.is_plain(delta):
            return self._encode_event(delta, counts)
        if not delta.text:
            return b""
        start = self._before_text.get(delta.index)
        if start is None:
            start = self._before_text[delta.index] = self._before_index % delta.index
        return start + encode_json(delta.text) + self._after_text

    def encode_ping(self, counts: TokenCounts) -> bytes:
        return PING

    def encode_end(self, counts: TokenCounts) -> bytes:
        """The events after the last delta."""
        if not (self._include_usage or self._builder.return_metrics):
            return DONE
        last = self._builder.build_event([])
        if self._include_usage:
            last["usage"] = build_usage(counts)
        if self._builder.return_metrics:
            last["metrics"] = build_metrics(counts)
        return _to_line(last) + DONE

    @staticmethod
    def encode_error(error: RequestError) -> bytes:
        """The events that end a failed stream."""
        return b"data: " + error_body(error) + b"\n\n" + DONE

    def _encode_event(self, delta: Delta, counts: TokenCounts | None) -> bytes:
        events = self._builder.build_events(delta)
        if counts is not None:
            usage = build_usage(counts)
            for event in events:
                event["usage"] = usage
            if delta.first and len(events) > 1:  # the first one opens the message and contains no token
                events[0]["usage"] = build_usage(msgspec.structs.replace(counts, completion=self._num_shown))
            self._num_shown = counts.completion
        elif self._include_usage:
            for event in events:
                event["usage"] = None
        return b"".join(map(_to_line, events))


def _to_line(event: Json) -> bytes:
    return b"data: " + encode_json(event) + b"\n\n"


def _build_template(builder: ResponseBuilder, include_usage: bool) -> tuple[bytes, bytes]:
    """The bytes of a plain event before its text, with %d for the choice's index, and after it."""
    without_choices = encode_json(builder.build_event([]))
    before, key, after = without_choices.rpartition(b'"choices":[')
    before_text, after_text = builder.plain_choice
    usage = b',"usage":null' if include_usage else b""
    prefix = b"data: " + before.replace(b"%", b"%%") + key + b'{"index":%d,' + before_text
    return prefix, after_text + after[:-1] + usage + b"}\n\n"
