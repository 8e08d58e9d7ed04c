"""The limits that `--limit NAME=VALUE` sets. Must stay quick to import, so that `--help` answers at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from serve_llm.common.options.fields import option
from serve_llm.common.options.parsers import (
    at_least_one,
    int_between,
    parse_bytes,
    parse_count,
    parse_seconds,
    parse_texts,
)

_positive_count = at_least_one(parse_count)
_positive_bytes = at_least_one(parse_bytes)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on requests and stored objects. Requests that exceed a limit get 400, 413 (body) or 431 (header)."""

    header_bytes: int = option(64 * 2**10, _positive_bytes, "request line and headers")
    body_bytes: int = option(16 * 2**20, _positive_bytes, "body of a request")
    all_bodies_bytes: int = option(256 * 2**20, _positive_bytes, "bodies being read at a time; further ones get 503")
    json_depth: int = option(64, int_between(1, 200), "nesting depth of objects and lists")
    json_values: int = option(2**20, _positive_count, "values in a body, which make parsing expensive")
    messages: int = option(10_000, _positive_count, "messages of a conversation")
    tools: int = option(256, _positive_count, "tools of a request")
    prompts: int = option(2048, _positive_count, "prompts of a request")
    n: int = option(128, _positive_count, "choices per prompt")
    choices: int = option(2048, _positive_count, "choices of a request: prompts times n")
    prompt_tokens: int = option(
        2**22, _positive_count, "tokens of a request's prompts and other lists, counted once per choice"
    )
    logprobs: int = option(
        2**17, _positive_count, "log-probabilities of a request: (logprobs + 1) times tokens, over all choices"
    )
    token_vector_numbers: int = option(
        2**23, _positive_count, "numbers in the vectors of a request's tokens (task token_embed)"
    )
    stop_strings: int = option(128, _positive_count, "stop strings")
    stop_characters: int = option(1024, _positive_count, "characters of a stop string or bad word")
    bad_words: int = option(256, _positive_count, "bad words")
    logit_bias: int = option(4096, _positive_count, "tokens with a bias")
    grammar_bytes: int = option(2**20, _positive_bytes, "JSON schema, regex, choices or grammar of structured output")
    template_characters: int = option(2**22, _positive_count, "characters of a rendered chat template")
    prompt_seconds: float = option(2.0, parse_seconds, "seconds for parsing, rendering and tokenizing")
    stall_seconds: float = option(
        30.0, parse_seconds, "seconds that a client may pause in a request or response, and seconds per MiB of a body"
    )
    stored_responses: int = option(
        10_000, _positive_count, "responses that --responses-store keeps; the oldest are deleted first"
    )
    stored_response_bytes: int = option(256 * 2**20, _positive_bytes, "their input, output and events together")
    stored_response_seconds: float = option(30 * 86400.0, parse_seconds, "age at which they are deleted")
    file_bytes: int = option(200 * 2**20, _positive_bytes, "an uploaded file")
    all_file_bytes: int = option(
        10 * 2**30, _positive_bytes, "all files of an API key together; further uploads are refused"
    )
    stored_files: int = option(10_000, _positive_count, "files of an API key; further uploads are refused")
    stored_batches: int = option(
        10_000, _positive_count, "batches of an API key; the oldest that have ended are deleted first"
    )
    batch_lines: int = option(50_000, _positive_count, "requests of a batch")

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Limits:
        """Limits from texts such as "body-bytes=1MiB"; the last text of a name wins. Raises ValueError."""
        values: dict[str, object] = {}
        parsers = {limit.name: limit.metadata["parse"] for limit in dataclasses.fields(cls)}
        for text in texts:
            name, equals, value = text.partition("=")
            name = name.strip().replace("-", "_")
            if not equals or name not in parsers:
                names = ", ".join(known.replace("_", "-") for known in parsers)
                raise ValueError(f"expected NAME=VALUE, with one of the names {names}")
            try:
                values[name] = parsers[name](value.strip())
            except ValueError as error:
                raise ValueError(f"{name.replace('_', '-')}: {error}") from None
        return dataclasses.replace(cls(), **values)  # type: ignore[arg-type]


def parse_limits(value: object) -> tuple[str, ...]:
    """Check several NAME=VALUE, given as a list or as one text with commas, and return them as texts."""
    texts = parse_texts(value)
    Limits.parse(texts)
    return texts
