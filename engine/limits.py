"""Limits on what one request may hold: `--limit NAME=VALUE`, each with its default. Knows `values` only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from serve_llm.engine import values

T = TypeVar("T")


def _limit(default: T, parse: values.Parse, help: str) -> T:
    return field(default=default, metadata={"parse": parse, "help": help})


_count = values.positive(values.parse_count)
_bytes = values.positive(values.parse_bytes)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Most of each; what is more is refused with 400, 413 (body) or 431 (header)."""

    header_bytes: int = _limit(64 * 2**10, _bytes, "request line and headers")
    body_bytes: int = _limit(16 * 2**20, _bytes, "a request's body")
    all_bodies_bytes: int = _limit(256 * 2**20, _bytes, "bodies being read at a time; past it 503")
    json_depth: int = _limit(64, values.whole(1, 200), "objects and lists inside each other")
    json_values: int = _limit(2**20, _count, "values in a body: they, not bytes, are what parsing costs")
    messages: int = _limit(10_000, _count, "messages of a conversation")
    prompts: int = _limit(2048, _count, "prompts of a request")
    n: int = _limit(128, _count, "choices per prompt")
    choices: int = _limit(2048, _count, "choices of a request: prompts times n")
    prompt_tokens: int = _limit(
        2**22, _count, "tokens of a request's prompts and other lists, counted for every choice"
    )
    logprobs: int = _limit(2**23, _count, "log-probabilities that a request may ask for, of all choices together")
    stop_strings: int = _limit(16, _count, "stop strings")
    stop_characters: int = _limit(1024, _count, "characters of a stop string or bad word")
    bad_words: int = _limit(256, _count, "bad words")
    logit_bias: int = _limit(4096, _count, "tokens with a bias")
    template_characters: int = _limit(2**22, _count, "characters that the chat template writes")
    prompt_seconds: float = _limit(2.0, values.seconds, "seconds that parsing, template and tokenizing may take")
    stall_seconds: float = _limit(
        30.0, values.seconds, "seconds for which a client may read, or send, nothing, and that a MiB of a body may take"
    )

    @classmethod
    def read(cls, given: Iterable[str]) -> Limits:
        """From texts such as "body-bytes=1MiB", the last of a name counting. Raises ValueError."""
        found: dict[str, object] = {}
        known = {limit.name: limit.metadata["parse"] for limit in dataclasses.fields(cls)}
        for text in given:
            name, equals, value = text.partition("=")
            name = name.strip().replace("-", "_")
            if not equals or name not in known:
                names = ", ".join(one.replace("_", "-") for one in known)
                raise ValueError(f"expected NAME=VALUE, with one of the names {names}")
            try:
                found[name] = known[name](value.strip())
            except ValueError as error:
                raise ValueError(f"{name.replace('_', '-')}: {error}") from None
        return dataclasses.replace(cls(), **found)  # type: ignore[arg-type]


def parse(value: object) -> tuple[str, ...]:
    """Several NAME=VALUE: a list, or one text with commas. They are checked, and stay text for the wire."""
    texts = values.texts(value)
    Limits.read(texts)
    return texts
