"""Token log-probabilities in the shapes that OpenAI's endpoints give them. Knows the tokenizer, not the text state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from serve_llm.engine.types import TokenLogprobs
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.reply.delta import TokenEntry
from serve_llm.server.schema.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from serve_llm.server.schema.common import PromptLogprob, PromptLogprobs
from serve_llm.server.schema.completions import CompletionLogprobs

_LOWEST = -9999.0  # JSON has no infinity; a forbidden token has minus that


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


def _likeliest(logprobs: TokenLogprobs, count: int) -> Iterator[tuple[int, float]]:
    """The `count` likeliest ids, best first; the engine may have been asked for more."""
    return zip(logprobs.top_ids[:count], map(_finite, logprobs.top_logprobs[:count]), strict=True)


def completion_logprobs(entries: Sequence[TokenEntry], count: int, tokenizer: Tokenizer) -> CompletionLogprobs:
    """`top_logprobs` holds the `count` likeliest and the chosen token. Of tokens with the same text, the likeliest."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprobs is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in (
            *_likeliest(entry.logprobs, count),
            (entry.token_id, _finite(entry.logprobs.logprob)),
        ):
            top.setdefault(tokenizer.token_text(token_id), logprob)
        tops.append(top)
    return CompletionLogprobs(
        text_offset=[entry.offset for entry in entries],
        token_logprobs=[None if entry.logprobs is None else _finite(entry.logprobs.logprob) for entry in entries],
        tokens=[tokenizer.token_text(entry.token_id) for entry in entries],
        top_logprobs=tops,
    )


def chat_logprobs(entries: Sequence[TokenEntry], count: int, tokenizer: Tokenizer) -> ChatLogprobs:
    content = []
    for entry in entries:
        if entry.logprobs is None:
            continue
        content.append(
            ChatTokenLogprob(
                **_shown(entry.token_id, entry.logprobs.logprob, tokenizer).model_dump(),
                top_logprobs=[_shown(*pair, tokenizer) for pair in _likeliest(entry.logprobs, count)],
            )
        )
    return ChatLogprobs(content=content)


def prompt_logprobs(
    found: Sequence[TokenLogprobs], ids: Sequence[int], count: int, tokenizer: Tokenizer
) -> PromptLogprobs:
    """One dictionary by token id per prompt token: the `count` likeliest and the token itself."""
    shown: PromptLogprobs = []
    for token_id, logprobs in zip(ids, found, strict=True):
        ranked = [(*pair, rank) for rank, pair in enumerate(_likeliest(logprobs, count), start=1)]
        ranked.append((token_id, _finite(logprobs.logprob), logprobs.rank))
        shown.append(
            {
                str(one): PromptLogprob(logprob=logprob, rank=rank, decoded_token=tokenizer.token_text(one))
                for one, logprob, rank in ranked
            }
        )
    return shown


def _shown(token_id: int, logprob: float, tokenizer: Tokenizer) -> ChatTopLogprob:
    content = tokenizer.token_bytes(token_id)
    return ChatTopLogprob(token=content.decode("utf-8", "replace"), logprob=_finite(logprob), bytes=list(content))
