"""Encodes deltas as server-sent events. The most frequent event, which only adds text, is assembled from prebuilt
bytes."""

from __future__ import annotations

import functools

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

    # A token's time is mostly that of fetching the objects of its stream; these are smaller with slots.
    __slots__ = (
        "_after_text",
        "_before_index",
        "_before_text",
        "_builder",
        "_include_usage",
        "_index",
        "_num_shown",
        "_returns_only_text",
        "continuous_usage",
    )

    def __init__(self, builder: ResponseBuilder) -> None:
        self.continuous_usage = builder.continuous_usage
        self._builder = builder
        self._include_usage = builder.include_usage
        self._returns_only_text = builder.returns_only_text and not builder.continuous_usage
        self._before_index = _build_start(builder)
        self._after_text = _build_end(builder.plain_choice[1], builder.include_usage)
        self._index = 0  # index of the choice that `_before_text` is for
        self._before_text = self._before_index % 0
        self._num_shown = 0  # generated tokens in the usage of the last event

    def encode(self, deltas: list[Delta], counts: TokenCounts | None) -> bytes:
        """Events for new deltas; empty if they hold no text yet. counts: needed for continuous usage only."""
        if len(deltas) == 1:  # usually
            return self._encode_delta(deltas[0], counts)
        return b"".join([self._encode_delta(delta, counts) for delta in deltas])

    def _encode_delta(self, delta: Delta, counts: TokenCounts | None) -> bytes:
        if not self._returns_only_text or not delta.is_plain:
            return self._encode_event(delta, counts)
        if not delta.text:
            return b""
        if delta.index != self._index:
            self._index = delta.index
            self._before_text = self._before_index % delta.index
        return self._before_text + encode_json(delta.text) + self._after_text

    @property
    def text_frame(self) -> tuple[bytes, bytes] | None:
        """What an event with only new text of choice 0 has before and after the text, which is a JSON string. None if
        events need more than the text."""
        return (self._before_index % 0, self._after_text) if self._returns_only_text else None

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
            shows_tokens = bool(delta.ordered_pieces) or delta.finish_reason is not None
            opens_without_token = delta.first and (len(events) > 1 or not shows_tokens)
            if opens_without_token:
                events[0]["usage"] = build_usage(msgspec.structs.replace(counts, completion=self._num_shown))
            if len(events) > 1 or shows_tokens:
                self._num_shown = counts.completion
        elif self._include_usage:
            for event in events:
                event["usage"] = None
        return b"".join(map(_to_line, events))


def _to_line(event: Json) -> bytes:
    return b"data: " + encode_json(event) + b"\n\n"


def _build_start(builder: ResponseBuilder) -> bytes:
    """The bytes of a plain event before its text, with %d for the choice's index."""
    before, key, _ = encode_json(builder.build_event([])).rpartition(b'"choices":[')
    return b"data: " + before.replace(b"%", b"%%") + key + b'{"index":%d,' + builder.plain_choice[0]


@functools.cache
def _build_end(after_text: bytes, include_usage: bool) -> bytes:
    """The bytes of a plain event after its text. One object for all streams, which the processor's caches then hold."""
    return after_text + b"]" + (b',"usage":null' if include_usage else b"") + b"}\n\n"
