"""Builds the replies of POST /v1/responses from deltas.

A stream's events and the reply without streaming come from the same object, `ReplyItems`.
"""

from __future__ import annotations

import time

from serve_llm.common.types import FinishReason
from serve_llm.server.dialects.pieces import ArgumentsPiece, CallBegin, CallEnd, ContentPiece, Piece, ReasoningPiece
from serve_llm.server.generate.delta import Delta, TokenCounts
from serve_llm.server.http.errors import GenerationFailed, InvalidRequest, RequestError
from serve_llm.server.prompt.custom_tools import CustomInputReader
from serve_llm.server.prompt.items import ToolItem, encrypt_text
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.response.builder import Json, ResponseMeta, encode_json
from serve_llm.server.response.logprobs import TokenTexts, chat_logprobs
from serve_llm.server.response.sse import PING, PING_SECONDS, START_SECONDS


class ReplyItems:
    """The output items of one response, which grow piece by piece. `add` and `close` return the events."""

    def __init__(
        self, response_id: str, tools: dict[str, ToolItem], encrypts_reasoning: bool, is_compaction: bool = False
    ) -> None:
        """tools: by the name that the model uses. is_compaction: the content is a summary."""
        self.items: list[Json] = []
        self._response_id = response_id
        self._tools = tools
        self._encrypts_reasoning = encrypts_reasoning
        self._is_compaction = is_compaction
        self._is_open = False  # whether the last item is open
        self._texts: list[str] = []  # in the open item
        self._custom_input = CustomInputReader()  # reads the open item if it is a custom tool's call
        self._logprobs: list[Json] = []

    def add(self, piece: Piece, logprobs: list[Json]) -> list[Json]:
        """logprobs: of the tokens of content."""
        match piece:
            case ContentPiece() if self._is_compaction:
                events = self._continue_item("compaction")
                self._texts.append(piece.text)
                return events
            case ContentPiece():
                events = self._continue_item("message")
                self._logprobs += logprobs
                return [*events, *self._extend(piece.text, "response.output_text.delta", {"logprobs": logprobs})]
            case ReasoningPiece():
                return [*self._continue_item("reasoning"), *self._extend(piece.text, "response.reasoning_text.delta")]
            case CallBegin():
                return [*self.close(), *self._open_call(piece)]
            case ArgumentsPiece():
                if self.items[-1]["type"] == "custom_tool_call":
                    return self._extend_input(self._custom_input.push(piece.text))
                return self._extend(piece.text, "response.function_call_arguments.delta")
            case CallEnd():
                return self.close()
        return []

    def close(self, status: str = "completed") -> list[Json]:
        """End the open item, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        events = self._extend_input(self._custom_input.finish()) if item["type"] == "custom_tool_call" else []
        text = "".join(self._texts)
        if "status" in item:
            item["status"] = status
        match item["type"]:
            case "message":
                events = self._close_message(item, text)
            case "reasoning":
                events = self._close_reasoning(item, text)
            case "compaction":
                item["encrypted_content"] = encrypt_text(text)
            case "custom_tool_call":
                item["input"] = text
                done = self._locate("response.custom_tool_call_input.done", {"input": text}, part=False)
                events = [*events, done]
            case _:
                item["arguments"] = text
                whole = {"name": item["name"], "arguments": text}
                events = [self._locate("response.function_call_arguments.done", whole, part=False)]
        return [*events, self._describe_item("response.output_item.done")]

    def _continue_item(self, kind: str) -> list[Json]:
        if self._is_open and self.items[-1]["type"] == kind:
            return []
        events = self.close()
        if kind == "reasoning":
            return [*events, *self._open({"id": "rs", "type": kind, "summary": [], "content": []})]
        if kind == "compaction":
            opening = self._open({"id": "cmp", "type": kind, "encrypted_content": ""})
            return [*events, *opening, self._locate("response.compaction.compacting", {}, part=False)]
        item = {"id": "msg", "type": kind, "status": "in_progress", "role": "assistant", "content": []}
        part = {"part": _describe_text("", [])}
        return [*events, *self._open(item), self._locate("response.content_part.added", part)]

    def _open_call(self, piece: CallBegin) -> list[Json]:
        tool = self._tools.get(piece.name, ToolItem(piece.name))
        item: Json = {"status": "in_progress", "call_id": piece.id, "name": tool.name}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        if tool.is_custom:
            self._custom_input = CustomInputReader()
            return self._open({"id": "ctc", "type": "custom_tool_call", **item, "input": ""})
        return self._open({"id": "fc", "type": "function_call", **item, "arguments": ""})

    def _open(self, item: Json) -> list[Json]:
        """item: its id has the item's prefix."""
        item["id"] = f"{item['id']}_{self._response_id}_{len(self.items)}"
        self.items.append(item)
        self._is_open = True
        self._texts = []
        self._logprobs = []
        return [self._describe_item("response.output_item.added")]

    def _extend(self, text: str, event: str, more: Json | None = None) -> list[Json]:
        self._texts.append(text)
        is_call = self.items[-1]["type"] in ("function_call", "custom_tool_call")
        return [self._locate(event, {"delta": text, **(more or {})}, part=not is_call)]

    def _extend_input(self, text: str) -> list[Json]:
        return self._extend(text, "response.custom_tool_call_input.delta") if text else []

    def _close_message(self, item: Json, text: str) -> list[Json]:
        part = _describe_text(text, self._logprobs)
        item["content"] = [part]
        return [
            self._locate("response.output_text.done", {"text": text, "logprobs": self._logprobs}),
            self._locate("response.content_part.done", {"part": part}),
        ]

    def _close_reasoning(self, item: Json, text: str) -> list[Json]:
        item["content"] = [{"type": "reasoning_text", "text": text}]
        if self._encrypts_reasoning:
            item["encrypted_content"] = encrypt_text(text)
        return [self._locate("response.reasoning_text.done", {"text": text})]

    def _describe_item(self, event: str) -> Json:
        return {"type": event, "output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _locate(self, event: str, content: Json, part: bool = True) -> Json:
        """Build an event about the last item. part: whether it is about the item's part."""
        place: Json = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        if part:
            place["content_index"] = 0
        return {"type": event, **place, **content}


class ResponsesBuilder:
    """Builds `schema.responses.ResponseReply`."""

    def __init__(self, tokenizer: Tokenizer, parsed: ValidGenerateRequest, meta: ResponseMeta) -> None:
        response_id = meta.id.partition("-")[2]
        self.items = ReplyItems(response_id, parsed.tool_items, parsed.encrypts_reasoning, parsed.is_compaction)
        self.id = f"resp_{response_id}"
        self.final: Json | None = None  # the response once it has ended
        self._meta = meta
        self._echo = parsed.echo  # fields that repeat the request
        self._num_logprobs = parsed.request.params.logprobs or 0  # most likely tokens to show, if deltas have any
        self._texts = TokenTexts(tokenizer)
        self._position = 0  # characters of the text so far, as in `TokenEntry.offset`

    def build_body(self, deltas: list[Delta], counts: TokenCounts) -> bytes:
        """deltas: one complete delta. Raises GenerationFailed."""
        (delta,) = deltas
        self.add(delta)
        status = name_status(delta)
        self.items.close(status)
        return encode_json(self.describe(status, counts))

    def add(self, delta: Delta) -> list[Json]:
        """Return the events for what the delta adds to the items."""
        events: list[Json] = []
        for piece in delta.ordered_pieces:
            begin = self._position
            if isinstance(piece, ContentPiece | ReasoningPiece | ArgumentsPiece):
                self._position += len(piece.text)
            entries = [entry for entry in delta.entries if entry.is_content and begin <= entry.offset < self._position]
            logprobs = chat_logprobs(entries, self._num_logprobs, self._texts)["content"]
            events += self.items.add(piece, logprobs)
        return events

    def describe(self, status: str, counts: TokenCounts | None = None, error: RequestError | None = None) -> Json:
        """Describe the response. counts: None while it is in progress."""
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response: Json = {
            "id": self.id,
            "object": "response",
            "created_at": self._meta.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "incomplete_details": details,
            "model": self._meta.model,
            "output": list(self.items.items) if counts is not None or error is not None else [],
            "error": None if error is None else _describe_error(error),
            "usage": None if counts is None else describe_usage(counts),
            "service_tier": "default",
            **self._echo,
        }
        if counts is not None or error is not None:
            self.final = response
        return response


class ResponsesEncoder:
    """Encodes the events of one stream."""

    continuous_usage = False
    start_seconds: float | None = START_SECONDS
    ping_seconds: float | None = PING_SECONDS

    def __init__(self, builder: ResponsesBuilder) -> None:
        self._builder = builder
        self._num_events = 0
        self._has_started = False
        self._status = "completed"

    def encode(self, deltas: list[Delta], counts: TokenCounts | None) -> bytes:
        """Raises GenerationFailed."""
        events = self._start()
        for delta in deltas:
            events += self._builder.add(delta)
            if delta.finish_reason is not None:
                self._status = name_status(delta)
        return self._write(events)

    def encode_ping(self, counts: TokenCounts) -> bytes:
        return self._write(self._start()) or PING

    def encode_end(self, counts: TokenCounts) -> bytes:
        events = [*self._start(), *self._builder.items.close(self._status)]
        response = self._builder.describe(self._status, counts)
        return self._write([*events, {"type": f"response.{self._status}", "response": response}])

    def encode_error(self, error: RequestError) -> bytes:
        events = self._builder.items.close("incomplete")
        response = self._builder.describe("failed", error=error)
        return self._write([*events, {"type": "response.failed", "response": response}])

    def encode_cancelled(self, rest: list[Delta], counts: TokenCounts) -> bytes:
        """Encode the end of a response that was ended from outside. rest: output that was generated but not encoded
        yet."""
        events = self._start()
        for delta in rest:
            events += self._builder.add(delta)
        events += self._builder.items.close("incomplete")
        response = self._builder.describe("cancelled", counts)
        return self._write([*events, {"type": "response.cancelled", "response": response}])

    def encode_queued(self) -> bytes:
        """Encode the first events of a background response."""
        response = self._builder.describe("queued")
        return self._write([{"type": f"response.{name}", "response": response} for name in ("created", "queued")])

    def _start(self) -> list[Json]:
        if self._has_started:
            return []
        self._has_started = True
        response = self._builder.describe("in_progress")
        names = ("in_progress",) if self._num_events else ("created", "in_progress")
        return [{"type": f"response.{name}", "response": response} for name in names]

    def _write(self, events: list[Json]) -> bytes:
        lines = []
        for event in events:
            data = encode_json({"type": event["type"], "sequence_number": self._num_events, **event})
            lines.append(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), data))
            self._num_events += 1
        return b"".join(lines)


def name_status(delta: Delta) -> str:
    """Return how the response ended. Raises GenerationFailed if it was aborted."""
    if delta.finish_reason is FinishReason.ABORT:
        raise GenerationFailed("the generation was aborted")
    return "incomplete" if delta.finish_reason is FinishReason.LENGTH else "completed"


def _describe_text(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def describe_usage(counts: TokenCounts) -> Json:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning or 0},
        "total_tokens": counts.prompt + counts.completion,
    }


def _describe_error(error: RequestError) -> Json:
    return {"code": "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error", "message": error.message}
