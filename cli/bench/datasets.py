"""Prompts of a benchmark: random ones, conversations from a file, or prompts that share prefixes.

Prompts are text, which every server accepts. They consist of words that are one token each in the model's tokenizer, so
a text of n words has n tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from serve_llm.cli.api_client import ApiClient, ApiError
from serve_llm.common.errors import OptionError

# Common in English text or in code: in most tokenizers, most of them are one token with a leading space.
WORDS = (
    "the of and to in is that it for as with on are this at be by from or an have not which all one can will more "
    "when if so no new also time only some than other into two her may over after such even most made first well "
    "way out should because through where much them then these just about between under many year work part state "
    "life world number system case group company place school program question government night point home water "
    "room area money story fact month lot right study book eye job word business issue side kind head house service "
    "friend power hour game line end member law car city name team minute idea body information back level office "
    "door health person art history party result change morning reason research moment education return import self "
    "string value data key file class object index type set list error test user code order model table"
).split()
MIN_WORDS = 16  # with fewer words, prompts are too similar

Prompt = TypeVar("Prompt", str, list[int])


class BenchRequest(NamedTuple):
    prompt: str
    output_tokens: int


class WordSource:
    """Random text of a given number of tokens."""

    def __init__(self, words: Sequence[str], is_exact: bool, seed: int) -> None:
        """is_exact: each word is one token."""
        self.words = list(words)
        self.is_exact = is_exact
        self.random = random.Random(seed)

    def make_text(self, num_tokens: int) -> str:
        return " " + " ".join(self.random.choices(self.words, k=num_tokens)) if num_tokens else ""


def find_words(client: ApiClient, model: str, seed: int) -> WordSource:
    """The words that are one token each according to the server's /tokenize; all words if it has no such route."""
    body = {"model": model, "prompt": " " + " ".join(WORDS), "return_token_strs": True}
    try:
        tokens = set(client.post_json("/tokenize", body).get("token_strs") or ())
    except (ApiError, AttributeError):  # a server from another vendor
        tokens = set()
    words = [word for word in WORDS if f"\u0120{word}" in tokens or f"\u2581{word}" in tokens]
    if len(words) < MIN_WORDS:
        return WordSource(WORDS, is_exact=False, seed=seed)
    return WordSource(words, is_exact=True, seed=seed)


def make_random(
    words: WordSource, count: int, input_len: int, output_len: int, range_ratio: float, prefix_len: int
) -> list[BenchRequest]:
    """Prompts of `prefix_len` shared tokens and `input_len` unique ones. Lengths vary by `range_ratio` either way."""

    def vary(length: int) -> int:
        return words.random.randint(max(1, int(length * (1 - range_ratio))), max(1, round(length * (1 + range_ratio))))

    prefix = words.make_text(prefix_len)
    return [BenchRequest(prefix + words.make_text(vary(input_len)), vary(output_len)) for _ in range(count)]


def make_prefix_repetition(
    words: WordSource, count: int, prefix_len: int, suffix_len: int, num_prefixes: int, output_len: int
) -> list[BenchRequest]:
    """See `repeat_prefixes`."""
    prompts = repeat_prefixes(words.make_text, words.random, count, prefix_len, suffix_len, num_prefixes)
    return [BenchRequest(prompt, output_len) for prompt in prompts]


def repeat_prefixes(
    make: Callable[[int], Prompt], rng: random.Random, count: int, prefix_len: int, suffix_len: int, num_prefixes: int
) -> list[Prompt]:
    """`num_prefixes` prefixes, each followed by equally many suffixes, in random order. make: returns a part of a
    prompt with the given number of tokens."""
    prefixes = [make(prefix_len) for _ in range(num_prefixes)]
    prompts = [prefixes[number % num_prefixes] + make(suffix_len) for number in range(count)]
    rng.shuffle(prompts)
    return prompts


def read_conversations(
    path: str, count: int, output_len: int | None, seed: int, count_tokens: Callable[[str], int]
) -> list[BenchRequest]:
    """The first question of random conversations, and as many output tokens as its answer has, or `output_len`.

    The file is JSON (a list) or JSONL of ShareGPT's {"conversations": [{"value": ...}, ...]} or of
    {"messages": [{"content": ...}, ...]}. Raises OptionError.
    """
    pairs = [pair for record in _read_records(path) if (pair := _find_turns(record)) is not None]
    if not pairs:
        raise OptionError(f"--dataset-path {path}: there is no conversation with a question and an answer in it")
    rng = random.Random(seed)
    rng.shuffle(pairs)
    chosen = [pairs[number % len(pairs)] for number in range(count)]
    return [BenchRequest(question, output_len or max(1, count_tokens(answer))) for question, answer in chosen]


def _read_records(path: str) -> list[object]:
    try:
        text = Path(path).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--dataset-path {path}: {error}") from None
    try:
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise OptionError(f"--dataset-path {path}: neither JSON nor JSONL: {error}") from None


def _find_turns(record: object) -> tuple[str, str] | None:
    """The texts of the first two turns."""
    if not isinstance(record, dict):
        return None
    turns = record.get("conversations") or record.get("messages")
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns):
        return None
    first, second = (turn.get("value") or turn.get("content") for turn in turns[:2])
    if not isinstance(first, str) or not isinstance(second, str) or not first or not second:
        return None
    return first, second
