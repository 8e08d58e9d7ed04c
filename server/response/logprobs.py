"""Log-probabilities of tokens in the shapes of OpenAI's endpoints, as plain data for JSON.

A response may contain more than a hundred thousand of them, so this uses no pydantic models and decodes each token
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from serve_llm.common.types import TokenLogprobs
from serve_llm.server.generate.delta import TokenEntry
from serve_llm.server.prompt.tokenizer import Tokenizer

_LOWEST = -9999.0  # replaces minus infinity (forbidden tokens), which JSON cannot represent


class TokenTexts(dict[int, tuple[str, list[int]]]):
    """Caches the text and the bytes of each token id. Bytes that are not whole characters become U+FFFD.

    names_by_id: the text is `token_id:<id>`.
    """

    def __init__(self, tokenizer: Tokenizer, names_by_id: bool = False) -> None:
        self._tokenizer = tokenizer
        self._names_by_id = names_by_id

    def __missing__(self, token_id: int) -> tuple[str, list[int]]:
        content = self._tokenizer.token_bytes(token_id)
        text = f"token_id:{token_id}" if self._names_by_id else content.decode("utf-8", "replace")
        described = (text, list(content))
        self[token_id] = described
        return described


def completion_logprobs(entries: Sequence[TokenEntry], count: int, texts: TokenTexts) -> dict[str, Any]:
    """`schema.completions.CompletionLogprobs`: the `count` most likely tokens and the chosen one per entry.

    Of tokens with the same text, the most likely is shown.
    """
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprobs is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in _top(entry.logprobs, count):
            top.setdefault(texts[token_id][0], logprob)
        top.setdefault(texts[entry.token_id][0], max(entry.logprobs.logprob, _LOWEST))
        tops.append(top)
    chosen = [None if entry.logprobs is None else max(entry.logprobs.logprob, _LOWEST) for entry in entries]
    return {
        "text_offset": [entry.offset for entry in entries],
        "token_logprobs": chosen,
        "tokens": [texts[entry.token_id][0] for entry in entries],
        "top_logprobs": tops,
    }


def chat_logprobs(entries: Sequence[TokenEntry], count: int, texts: TokenTexts) -> dict[str, Any]:
    """`schema.chat.ChatLogprobs`: each token with the `count` most likely alternatives."""
    content = []
    for entry in entries:
        if entry.logprobs is None:
            continue
        token = _describe(entry.token_id, max(entry.logprobs.logprob, _LOWEST), texts)
        token["top_logprobs"] = [
            _describe(token_id, logprob, texts) for token_id, logprob in _top(entry.logprobs, count)
        ]
        content.append(token)
    return {"content": content}


def prompt_logprobs(
    logprobs: Sequence[TokenLogprobs], token_ids: Sequence[int], count: int, texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """`schema.common.PromptLogprobs`: per prompt token, the `count` most likely ids and its own; the first is None.

    token_ids: the prompt without its first token.
    """
    positions: list[dict[str, Any] | None] = [None]
    for token_id, one in zip(token_ids, logprobs, strict=True):
        position = {}
        for rank, (top_id, logprob) in enumerate(_top(one, count), start=1):
            position[str(top_id)] = {"logprob": logprob, "rank": rank, "decoded_token": texts[top_id][0]}
        entry = {"logprob": max(one.logprob, _LOWEST), "rank": one.rank, "decoded_token": texts[token_id][0]}
        position[str(token_id)] = entry
        positions.append(position)
    return positions


def _top(logprobs: TokenLogprobs, count: int) -> Iterator[tuple[int, float]]:
    """The `count` most likely (id, log-probability), best first. The engine may have been asked for more."""
    for token_id, logprob in zip(logprobs.top_ids[:count], logprobs.top_logprobs[:count], strict=True):
        yield token_id, max(logprob, _LOWEST)


def _describe(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text, content = texts[token_id]
    return {"token": text, "logprob": logprob, "bytes": content}
