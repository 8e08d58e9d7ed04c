"""Deltas in the shapes of the two endpoints: choices of a reply, and choices of a stream's events.

Knows the wire's schema, not the transport. A field that was not asked for is absent, not null.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from pydantic import BaseModel

from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.prompt.validate import TextRequest
from serve_llm.server.reply.delta import Delta, TokenCounts
from serve_llm.server.reply.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from serve_llm.server.schema import chat, completions
from serve_llm.server.schema.common import PromptTokensDetails, Usage


class Head(msgspec.Struct, frozen=True):
    """What every reply and event begins with."""

    id: str
    created: int  # Unix seconds
    model: str
    system_fingerprint: str


Event = completions.Completion | chat.ChatEvent


class Shape(Protocol):
    """One endpoint's choices. `plain` is what stands in an event's choice around the text that is its only news."""

    plain: tuple[bytes, bytes]

    def reply(self, head: Head, usage: Usage) -> BaseModel:
        """Without choices."""

    def choice(self, delta: Delta) -> BaseModel:
        """One of a reply."""

    def event(self, head: Head, delta: Delta | None) -> Event:
        """Without usage; without a choice if there is no delta."""

    def opening(self, head: Head, delta: Delta) -> Event | None:
        """An event before the first one of a choice."""

    def is_plain(self, delta: Delta) -> bool: ...


class _Details:
    """Fields that choices of both endpoints have when they were asked for."""

    def __init__(self, tokenizer: Tokenizer, request: TextRequest, return_token_ids: bool) -> None:
        self.tokenizer = tokenizer
        self.request = request
        self.return_token_ids = return_token_ids
        self.num_logprobs = request.params.logprobs

    def is_plain(self, delta: Delta) -> bool:
        return not (delta.first or delta.entries or self.return_token_ids) and delta.finish_reason is None

    def ending(self, delta: Delta) -> dict[str, object]:
        fields: dict[str, object] = {
            "index": delta.index,
            "finish_reason": None if delta.finish_reason is None else delta.finish_reason.value,
        }
        if delta.finish_reason is not None:
            fields["stop_reason"] = delta.stop_reason
        prompt_ids = self.request.prompts[delta.index // self.request.params.n]
        if self.return_token_ids:
            fields["token_ids"] = delta.token_ids
            if delta.first:
                fields["prompt_token_ids"] = prompt_ids
        if delta.prompt_logprobs is not None:
            count, start = self.request.params.prompt_logprobs or 0, delta.prompt_start
            ids = prompt_ids[start : start + len(delta.prompt_logprobs)]
            shown = prompt_logprobs(delta.prompt_logprobs, ids, count, self.tokenizer)
            fields["prompt_logprobs"] = [None, *shown] if start == 1 else shown  # none for the very first token
        return fields


class CompletionShape(_Details):
    plain = (b'"text":', b',"logprobs":null,"finish_reason":null}')

    def reply(self, head: Head, usage: Usage) -> BaseModel:
        reply = self._object(head, [])
        reply.usage = usage
        return reply

    def event(self, head: Head, delta: Delta | None) -> Event:
        return self._object(head, [] if delta is None else [self.choice(delta)])

    def opening(self, head: Head, delta: Delta) -> Event | None:
        return None

    def _object(self, head: Head, choices: list[completions.CompletionChoice]) -> completions.Completion:
        return completions.Completion(object="text_completion", choices=choices, **msgspec.structs.asdict(head))

    def choice(self, delta: Delta) -> completions.CompletionChoice:
        logprobs = None
        if self.num_logprobs is not None:
            logprobs = completion_logprobs(delta.entries, self.num_logprobs, self.tokenizer)
        return completions.CompletionChoice(text=delta.text, logprobs=logprobs, **self.ending(delta))  # type: ignore[arg-type]


class ChatShape(_Details):
    plain = (b'"delta":{"content":', b'},"logprobs":null,"finish_reason":null}')

    def reply(self, head: Head, usage: Usage) -> BaseModel:
        return chat.ChatCompletion(object="chat.completion", choices=[], usage=usage, **msgspec.structs.asdict(head))

    def choice(self, delta: Delta) -> BaseModel:
        message = chat.ChatReplyMessage(role="assistant", content=delta.text)
        return chat.ChatChoice(message=message, logprobs=self._logprobs(delta), **self.ending(delta))  # type: ignore[arg-type]

    def event(self, head: Head, delta: Delta | None) -> Event:
        choices = []
        if delta is not None:
            new = chat.ChatDelta(content=delta.text) if delta.text else chat.ChatDelta()
            choices = [chat.ChatEventChoice(delta=new, logprobs=self._logprobs(delta), **self.ending(delta))]  # type: ignore[arg-type]
        return self._object(head, choices)

    def opening(self, head: Head, delta: Delta) -> Event | None:
        role = chat.ChatDelta(role="assistant", content="")
        return self._object(
            head, [chat.ChatEventChoice(index=delta.index, delta=role, logprobs=None, finish_reason=None)]
        )

    def _object(self, head: Head, choices: list[chat.ChatEventChoice]) -> chat.ChatEvent:
        return chat.ChatEvent(object="chat.completion.chunk", choices=choices, **msgspec.structs.asdict(head))

    def _logprobs(self, delta: Delta) -> chat.ChatLogprobs | None:
        if self.num_logprobs is None:
            return None
        return chat_logprobs(delta.entries, self.num_logprobs, self.tokenizer)


def usage_of(counts: TokenCounts) -> Usage:
    return Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.completion,
        total_tokens=counts.prompt + counts.completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=counts.cached),
    )
