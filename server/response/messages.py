"""Builds the replies of POST /v1/messages from deltas: the whole body, or a stream's events."""

from __future__ import annotations

from pydantic_core import from_json

from serve_llm.common.types import FinishReason
from serve_llm.server.dialects.pieces import ArgumentsPiece, CallBegin, CallEnd, ContentPiece, Piece, ReasoningPiece
from serve_llm.server.generate.delta import Delta, TokenCounts
from serve_llm.server.http.anthropic_errors import describe_error
from serve_llm.server.http.errors import GenerationFailed, RequestError
from serve_llm.server.prompt.blocks import sign_thinking
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.response.builder import Json, ResponseMeta, encode_json
from serve_llm.server.response.sse import PING_SECONDS, START_SECONDS


class MessageBuilder:
    """Builds `schema.messages.MessageReply`."""

    def __init__(self, tokenizer: Tokenizer, parsed: ValidGenerateRequest, meta: ResponseMeta) -> None:
        self.omits_thinking = parsed.omits_thinking
        self.is_compaction = parsed.is_compaction
        self._is_cut_by_context = parsed.is_cut_by_context
        self._meta = meta

    def build_body(self, deltas: list[Delta], counts: TokenCounts) -> bytes:
        """deltas: one complete delta. Raises GenerationFailed."""
        (delta,) = deltas
        if self.is_compaction:
            texts = [piece.text for piece in delta.ordered_pieces if isinstance(piece, ContentPiece)]
            end = self.describe_end(delta)
            return encode_json({**self.describe(counts), "content": [self.describe_summary(texts, end)], **end})
        calls = iter(delta.collect_calls())
        blocks: list[Json] = []
        texts = []  # in the last block
        for piece in delta.ordered_pieces:
            match piece:
                case ContentPiece() | ReasoningPiece():
                    kind = "text" if isinstance(piece, ContentPiece) else "thinking"
                    if not blocks or blocks[-1]["type"] != kind:
                        texts = []
                        blocks.append({"type": kind, kind: texts})
                    texts.append(piece.text)
                case CallBegin():
                    arguments = _parse_arguments(next(calls).arguments)
                    blocks.append({"type": "tool_use", "id": piece.id, "name": piece.name, "input": arguments})
        for block in blocks:
            if block["type"] == "text":
                block["text"] = "".join(block["text"])
            elif block["type"] == "thinking":
                text = "".join(block["thinking"])
                block["thinking"] = "" if self.omits_thinking else text
                block["signature"] = sign_thinking(text, is_omitted=self.omits_thinking)
        body = self.describe(counts)
        empty = [{"type": "text", "text": ""}] if counts.completion else []  # nothing was generated: max_tokens is 0
        body["content"] = blocks or empty
        body |= self.describe_end(delta)
        return encode_json(body)

    @staticmethod
    def describe_summary(texts: list[str], end: Json) -> Json:
        """Describe the block of a summary, without content if its end was cut off: it must not replace the
        conversation."""
        summary = "".join(texts).strip()
        return {"type": "compaction", "content": summary if summary and end["stop_reason"] == "compaction" else None}

    def describe(self, counts: TokenCounts) -> Json:
        """Describe the message before it has content."""
        return {
            "id": self._meta.id.replace("-", "_"),
            "type": "message",
            "role": "assistant",
            "model": self._meta.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": build_message_usage(counts),
        }

    def describe_end(self, delta: Delta) -> Json:
        """Describe how the message ended. Raises GenerationFailed if it was aborted."""
        if delta.finish_reason is FinishReason.ABORT:
            raise GenerationFailed("the generation was aborted")
        stop_sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        if stop_sequence is not None:
            reason = "stop_sequence"
        elif delta.finish_reason is FinishReason.LENGTH:
            reason = "model_context_window_exceeded" if self._is_cut_by_context else "max_tokens"
        elif self.is_compaction:
            reason = "compaction"
        else:
            reason = "tool_use" if delta.ends_with_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop_sequence}


class MessageEncoder:
    """Encodes the events of one stream. Content blocks follow each other: one is open at a time."""

    continuous_usage = True
    start_seconds: float | None = START_SECONDS
    ping_seconds: float | None = PING_SECONDS

    def __init__(self, builder: MessageBuilder) -> None:
        self._builder = builder
        self._has_started = False
        self._num_blocks = 0
        self._open: str | None = None  # type of the open block
        self._thoughts: list[str] = []  # in the open block
        self._summary: list[str] = []
        self._end: Json | None = None

    def encode(self, deltas: list[Delta], counts: TokenCounts | None) -> bytes:
        """Raises GenerationFailed."""
        assert counts is not None
        events = self._start(counts)
        for delta in deltas:
            for piece in delta.ordered_pieces:
                events += self._describe_piece(piece)
            if delta.finish_reason is not None:
                self._end = self._builder.describe_end(delta)
        return b"".join(map(_to_event, events))

    def encode_ping(self, counts: TokenCounts) -> bytes:
        return b"".join(map(_to_event, [*self._start(counts), {"type": "ping"}]))

    def encode_end(self, counts: TokenCounts) -> bytes:
        events = self._start(counts)
        if self._builder.is_compaction and self._end is not None:
            block = self._builder.describe_summary(self._summary, self._end)
            events += self._open_block({"type": "compaction", "content": None})
            events.append(self._describe_delta({"type": "compaction_delta", "content": block["content"]}))
        elif self._num_blocks == 0 and counts.completion:
            events += self._open_block({"type": "text", "text": ""})
        events += self._close_block()
        events.append({"type": "message_delta", "delta": self._end, "usage": build_message_usage(counts)})
        events.append({"type": "message_stop"})
        return b"".join(map(_to_event, events))

    @staticmethod
    def encode_error(error: RequestError) -> bytes:
        return _to_event(describe_error(error))

    def _start(self, counts: TokenCounts) -> list[Json]:
        if self._has_started:
            return []
        self._has_started = True
        return [{"type": "message_start", "message": self._builder.describe(counts)}]

    def _describe_piece(self, piece: Piece) -> list[Json]:
        match piece:
            case ContentPiece() if self._builder.is_compaction:
                self._summary.append(piece.text)  # sent at the end, if it is complete
            case _ if self._builder.is_compaction:
                pass  # the block of the summary is alone
            case ContentPiece():
                opening = self._continue_block({"type": "text", "text": ""})
                return [*opening, self._describe_delta({"type": "text_delta", "text": piece.text})]
            case ReasoningPiece():
                opening = self._continue_block({"type": "thinking", "thinking": "", "signature": ""})
                self._thoughts.append(piece.text)
                if self._builder.omits_thinking:
                    return opening
                return [*opening, self._describe_delta({"type": "thinking_delta", "thinking": piece.text})]
            case CallBegin():
                block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
                return [*self._close_block(), *self._open_block(block)]
            case ArgumentsPiece():
                return [self._describe_delta({"type": "input_json_delta", "partial_json": piece.text})]
            case CallEnd():
                return self._close_block()
        return []

    def _continue_block(self, block: Json) -> list[Json]:
        """Open the block unless one of its type is open."""
        if self._open == block["type"]:
            return []
        return [*self._close_block(), *self._open_block(block)]

    def _open_block(self, block: Json) -> list[Json]:
        self._open = block["type"]
        self._thoughts = []
        self._num_blocks += 1
        return [{"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}]

    def _describe_delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _close_block(self) -> list[Json]:
        if self._open is None:
            return []
        events: list[Json] = []
        if self._open == "thinking":
            signature = sign_thinking("".join(self._thoughts), is_omitted=self._builder.omits_thinking)
            events.append(self._describe_delta({"type": "signature_delta", "signature": signature}))
        self._open = None
        return [*events, {"type": "content_block_stop", "index": self._num_blocks - 1}]


def build_message_usage(counts: TokenCounts) -> Json:
    """`schema.messages.MessageUsage`."""
    return {
        "input_tokens": counts.prompt - counts.cached,
        "output_tokens": counts.completion,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens_details": {"thinking_tokens": counts.reasoning or 0},
    }


def _parse_arguments(text: str) -> object:
    """Parse the complete part of truncated arguments."""
    try:
        found = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _to_event(event: Json) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), encode_json(event))
