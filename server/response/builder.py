"""Builds responses of /v1/completions and /v1/chat/completions from deltas: a whole body, or a stream's events.

Responses are plain data for JSON in the shapes of `server.schema`, which documents them. Fields that were not requested
are absent, not null.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import msgspec

from serve_llm.server.dialects.pieces import (
    ArgumentsPiece,
    CallBegin,
    CallEnd,
    ContentPiece,
    Piece,
    ReasoningPiece,
)
from serve_llm.server.generate.delta import Delta, TokenCounts, ToolCall
from serve_llm.server.prompt.custom_tools import CustomInputReader, read_custom_input
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.response.logprobs import TokenTexts, chat_logprobs, completion_logprobs, prompt_logprobs
from serve_llm.server.schema.common import ResponseMetrics

Json = dict[str, Any]

encode_json = msgspec.json.Encoder().encode


class ResponseMeta(msgspec.Struct, frozen=True):
    """Fields that a response and all its events have in common."""

    id: str
    created: int  # Unix seconds
    model: str
    system_fingerprint: str
    reasoning_field: str = "reasoning"  # name of the reasoning in messages

    def describe(self, object_type: str) -> Json:
        return {
            "id": self.id,
            "object": object_type,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class ResponseBuilder(ABC):
    """Builds one endpoint's response to one request."""

    body_type: ClassVar[str]  # "object" of a body
    event_type: ClassVar[str]  # "object" of an event
    shows_prompt_once: ClassVar[bool]  # ids and logprobs of the prompt are at the top level, not in each choice
    plain_choice: ClassVar[tuple[bytes, bytes]]  # JSON of a plain choice: before and after the text

    def __init__(self, tokenizer: Tokenizer, parsed: ValidGenerateRequest, meta: ResponseMeta) -> None:
        self.return_metrics = parsed.return_metrics
        self.include_usage = parsed.include_usage  # as a stream's last event; null in all others, as OpenAI does it
        self.continuous_usage = parsed.continuous_usage  # every event has the usage so far
        self._request = parsed.request
        self._return_token_ids = parsed.return_token_ids
        self._num_logprobs = parsed.request.params.max_logprobs
        self._meta = meta
        self._opening_text = parsed.opening_text
        self._custom_tools = parsed.tool_items
        self._custom_inputs: dict[int, CustomInputReader] = {}  # by index of a choice that is inside a custom tool call
        self._texts = TokenTexts(tokenizer)
        names_by_id = parsed.return_tokens_as_token_ids
        self._shown_texts = TokenTexts(tokenizer, names_by_id=True) if names_by_id else self._texts

    def build_body(self, deltas: list[Delta], counts: TokenCounts) -> bytes:
        """The JSON of a response without streaming. deltas: one complete delta per choice."""
        body = self._meta.describe(self.body_type)
        body["choices"] = [self._build_choice(delta) for delta in deltas]
        if self.shows_prompt_once:
            self._add_prompt(body, deltas[0])
        body["usage"] = build_usage(counts)
        if self.return_metrics:
            body["metrics"] = build_metrics(counts)
        return encode_json(body)

    @abstractmethod
    def build_events(self, delta: Delta) -> list[Json]:
        """The events for a delta, without usage."""

    def build_event(self, choices: list[Json]) -> Json:
        event = self._meta.describe(self.event_type)
        event["choices"] = choices
        return event

    @property
    def returns_only_text(self) -> bool:
        """Whether the event of a plain delta contains only text, so that it can be assembled from prebuilt bytes."""
        return not self._return_token_ids

    @abstractmethod
    def _build_choice(self, delta: Delta) -> Json:
        """A choice of a body."""

    def _add_details(self, choice: Json, delta: Delta) -> Json:
        """Complete a choice with the fields that follow its logprobs in both endpoints."""
        choice["finish_reason"] = delta.name_finish_reason(self._request.reply)
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _add_prompt(self, target: Json, delta: Delta) -> Json:
        """Add requested details of the prompt, if this is the choice's first delta."""
        prompt_ids = self._request.prompts[delta.index // self._request.params.n]
        if self._return_token_ids and delta.first:
            target["prompt_token_ids"] = prompt_ids
        if delta.prompt_logprobs is not None:
            count = self._request.params.prompt_logprobs or 0
            target["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs, prompt_ids[1:], count, self._texts)
        return target


class CompletionBuilder(ResponseBuilder):
    """`schema.completions.Completion`."""

    body_type = "text_completion"
    event_type = "text_completion"
    shows_prompt_once = False
    plain_choice = (b'"text":', b',"logprobs":null,"finish_reason":null}')

    def _build_choice(self, delta: Delta) -> Json:
        logprobs = None
        if self._num_logprobs is not None:
            logprobs = completion_logprobs(delta.entries, self._num_logprobs, self._shown_texts)
        choice = self._add_details({"index": delta.index, "text": delta.text, "logprobs": logprobs}, delta)
        return self._add_prompt(choice, delta)

    def build_events(self, delta: Delta) -> list[Json]:
        return [self.build_event([self._build_choice(delta)])]


class ChatBuilder(ResponseBuilder):
    """`schema.chat.ChatCompletion` and `schema.chat.ChatEvent`."""

    body_type = "chat.completion"
    event_type = "chat.completion.chunk"
    shows_prompt_once = True
    plain_choice = (b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}')

    def build_events(self, delta: Delta) -> list[Json]:
        """One event for the role, and one for each piece of the delta; the last one holds everything else. No
        events if the delta has nothing to show yet."""
        news: list[Json] = [{"role": "assistant", "content": ""}] if delta.first else []
        if delta.first and self._opening_text:
            news.append({"content": self._opening_text})
        for piece in delta.ordered_pieces:
            news += self._describe_piece(piece, delta.index)
        if delta.finish_reason is not None:
            news += self._end_custom_call(delta.num_calls - 1, delta.index)
        has_details = bool(delta.entries) or self._return_token_ids or delta.finish_reason is not None
        if len(news) == delta.first and has_details:
            news.append({})
        if not news:
            return []
        *before, last = ({"index": delta.index, "delta": new, "logprobs": None, "finish_reason": None} for new in news)
        last["logprobs"] = self._logprobs(delta)
        events = [self.build_event([choice]) for choice in (*before, self._add_details(last, delta))]
        self._add_prompt(events[0], delta)
        return events

    def _describe_piece(self, piece: Piece, choice: int) -> list[Json]:
        """Convert the piece to `delta` objects of events. choice: its index."""
        match piece:
            case ContentPiece():
                return [{"content": piece.text}]
            case ReasoningPiece():
                return [{self._meta.reasoning_field: piece.text}]
            case CallBegin():
                if piece.name in self._custom_tools:
                    self._custom_inputs[choice] = CustomInputReader()
                call = self._describe_call(ToolCall(piece.id, piece.name, ""))
                return [{"tool_calls": [{"index": piece.index, **call}]}]
            case ArgumentsPiece():
                if choice in self._custom_inputs:
                    return _describe_input(piece.index, self._custom_inputs[choice].push(piece.text))
                return [{"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}]
            case CallEnd():
                return self._end_custom_call(piece.index, choice)
        return []

    def _end_custom_call(self, call: int, choice: int) -> list[Json]:
        reader = self._custom_inputs.pop(choice, None)
        return [] if reader is None else _describe_input(call, reader.finish())

    def _describe_call(self, call: ToolCall) -> Json:
        if call.name in self._custom_tools:
            custom = {"name": call.name, "input": read_custom_input(call.arguments)}
            return {"id": call.id, "type": "custom", "custom": custom}
        return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

    def _build_choice(self, delta: Delta) -> Json:
        calls = [self._describe_call(call) for call in delta.collect_calls()]
        text = self._opening_text + delta.text
        message: Json = {"role": "assistant", "content": text or None if calls else text}
        if reasoning := delta.reasoning:
            message[self._meta.reasoning_field] = reasoning
        if calls:
            message["tool_calls"] = calls
        return self._add_details({"index": delta.index, "message": message, "logprobs": self._logprobs(delta)}, delta)

    def _logprobs(self, delta: Delta) -> Json | None:
        if self._num_logprobs is None or not (delta.entries or delta.finish_reason):
            return None
        return chat_logprobs(delta.entries, self._num_logprobs, self._shown_texts)


def _describe_input(call: int, text: str) -> list[Json]:
    """Describe further text of a custom tool's call. call: its index."""
    return [{"tool_calls": [{"index": call, "custom": {"input": text}}]}] if text else []


def build_usage(counts: TokenCounts) -> Json:
    """`schema.common.Usage`."""
    usage: Json = {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }
    if counts.reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": counts.reasoning}
    return usage


def build_metrics(counts: TokenCounts) -> Json:
    """`schema.common.ResponseMetrics`."""
    times = counts.times
    if times is None:
        return dict.fromkeys(ResponseMetrics.model_fields)
    num_later = counts.completion - times.num_choices  # tokens that are not the first of their choice
    inference = times.last_token - times.scheduled
    return {
        "queue_time_ms": _to_ms(times.scheduled - times.submitted),
        "time_to_first_token_ms": _to_ms(times.first_token - times.scheduled),
        "generation_time_ms": _to_ms(times.last_token - times.first_token),
        "mean_itl_ms": _to_ms(times.decode_seconds / num_later) if num_later > 0 else None,
        "tokens_per_second": round(counts.completion / inference, 3) if inference > 0 else None,
    }


def _to_ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
