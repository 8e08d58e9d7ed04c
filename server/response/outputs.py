"""The results of `LLM`'s methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from serve_llm.common.types import TokenLogprobs
from serve_llm.server.generate.delta import Delta, ToolCall
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.prompt.validate import TextRequest


@dataclass(frozen=True)
class Logprob:
    """Natural log of a token's probability in the model's raw distribution, and its rank (1: the most likely)."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str  # in `chat`: without reasoning and tool calls
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", or, in `chat`, "tool_calls"
    stop_reason: int | str | None  # the stop id or stop string of the request that ended the text, if one did
    logprobs: list[dict[int, Logprob]] | None  # per token: itself and the most likely ones
    cumulative_logprob: float | None
    reasoning: str = ""  # in `chat`
    tool_calls: list[ToolCall] = field(default_factory=list)  # in `chat`

    def finished(self) -> bool:
        """As in vLLM; always true, because calls return when all texts have ended."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestOutput:
    """One prompt with its n choices."""

    request_id: str
    prompt: str | None  # None if it was given as ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # the first entry is None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    score: float


VectorOutput = TypeVar("VectorOutput", EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[VectorOutput]):
    """The result for one text, or one pair of texts."""

    request_id: str
    prompt_token_ids: list[int]  # the ids of both texts if two embeddings were compared
    outputs: VectorOutput
    finished: bool = True


def build_completion(delta: Delta, request: TextRequest, tokenizer: Tokenizer) -> CompletionOutput:
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative: float | None = None
    if request.params.logprobs is not None:
        entries = [(entry.token_id, entry.logprobs) for entry in delta.entries if entry.logprobs is not None]
        logprobs = [
            build_token_logprobs(token_id, entry, request.params.logprobs, tokenizer) for token_id, entry in entries
        ]
        cumulative = sum(entry.logprob for _, entry in entries)
    return CompletionOutput(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.name_finish_reason(request.reply),
        stop_reason=delta.stop_reason,
        logprobs=logprobs,
        cumulative_logprob=cumulative,
        reasoning=delta.reasoning,
        tool_calls=delta.collect_calls(),
    )


def build_token_logprobs(token_id: int, entry: TokenLogprobs, count: int, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return the token itself, the `count` most likely ones and the requested ones, whose rank is unknown, by id."""
    logprobs = {token_id: Logprob(entry.logprob, entry.rank, tokenizer.token_text(token_id))}
    for rank, (other, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
        logprobs.setdefault(other, Logprob(logprob, rank if rank <= count else None, tokenizer.token_text(other)))
    return logprobs
