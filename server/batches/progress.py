"""How far a stored batch is: how many requests have a result, and the tokens of those that were answered."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from serve_llm.server.batches.objects import BatchUsage, InputTokens, RequestCounts


class AnyOutputTokens(msgspec.Struct):
    reasoning_tokens: int = 0
    thinking_tokens: int = 0


class AnyUsage(msgspec.Struct):
    """The usage of any route: OpenAI's older and newer names, and Anthropic's."""

    prompt_tokens: int = 0
    prompt_tokens_details: InputTokens | None = None
    completion_tokens: int = 0
    completion_tokens_details: AnyOutputTokens | None = None
    input_tokens: int = 0
    input_tokens_details: InputTokens | None = None
    output_tokens: int = 0
    output_tokens_details: AnyOutputTokens | None = None
    cache_read_input_tokens: int = 0  # Anthropic's input_tokens do not include these


class BodyWithUsage(msgspec.Struct):
    usage: AnyUsage | None = None


class AnswerWithUsage(msgspec.Struct):
    body: BodyWithUsage


class AnsweredLine(msgspec.Struct):
    response: AnswerWithUsage | None = None


_read_line = msgspec.json.Decoder(AnsweredLine).decode


@dataclass
class StoredProgress:
    counts: RequestCounts = field(default_factory=RequestCounts)
    usage: BatchUsage = field(default_factory=BatchUsage)

    def count_tokens(self, line: bytes) -> None:
        """Add the tokens of a line of the output."""
        response = _read_line(line).response
        found = None if response is None else response.body.usage
        if found is None:
            return
        before = found.prompt_tokens_details or found.input_tokens_details or InputTokens()
        after = found.completion_tokens_details or found.output_tokens_details or AnyOutputTokens()
        num_input = found.prompt_tokens + found.input_tokens + found.cache_read_input_tokens
        num_output = found.completion_tokens + found.output_tokens
        self.usage.input_tokens += num_input
        self.usage.input_tokens_details.cached_tokens += before.cached_tokens + found.cache_read_input_tokens
        self.usage.output_tokens += num_output
        self.usage.output_tokens_details.reasoning_tokens += after.reasoning_tokens + after.thinking_tokens
        self.usage.total_tokens += num_input + num_output
