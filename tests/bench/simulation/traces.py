"""Traces: when requests arrive and how long they are. Read from and written to JSON lines, or generated from a seed.

A line is an object with the fields of `TraceRequest`. Requests with equal `prefix` begin with the same
`prefix_tokens` ids. The requests of a `conversation` are its turns, in order of arrival: the prompt of a turn is that
of the turn before, the reply to it, and the turn's own tokens. A turn that arrives before that reply is sent after it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request. Its prompt is `prompt_ids`, or else `prefix_tokens` of its prefix and `prompt_tokens` of its own."""

    at: float  # seconds from the start
    output_tokens: int
    prompt_ids: list[int] = []
    prompt_tokens: int = 0
    prefix: int | None = None
    prefix_tokens: int = 0
    conversation: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError; from JSON, msgspec.ValidationError."""
        if not 0 <= self.at < float("inf"):
            raise ValueError("`at` must be a finite number of seconds, 0 or more")
        if self.output_tokens < 1:
            raise ValueError("`output_tokens` must be 1 or more")
        if self.prompt_tokens < 0 or self.prefix_tokens < 0:
            raise ValueError("numbers of tokens must not be negative")
        if (self.prefix is None) != (self.prefix_tokens == 0):
            raise ValueError("`prefix` and `prefix_tokens` go together")
        if self.prompt_ids and (self.prompt_tokens or self.prefix_tokens):
            raise ValueError("a prompt is either `prompt_ids` or numbers of tokens")
        if not self.prompt_ids and not self.prompt_tokens:
            raise ValueError("a request needs `prompt_ids` or `prompt_tokens`")


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace in order of arrival. Raises ValueError that names the line."""
    decoder = msgspec.json.Decoder(TraceRequest)
    trace = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            trace.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not trace:
        raise ValueError(f"{path} has no requests")
    return sorted(trace, key=lambda one: one.at)


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    path.write_bytes(msgspec.json.Encoder().encode_lines(trace))


@dataclass(frozen=True)
class Lengths:
    """Log-normal token counts, clipped at both ends."""

    median: float
    sigma: float  # standard deviation of the logarithm
    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        return min(self.most, max(self.least, round(self.median * rng.lognormvariate(0.0, self.sigma))))


@dataclass(frozen=True)
class Mix:
    """The composition of a generated trace."""

    prompt: Lengths
    output: Lengths
    num_prefixes: int = 0  # shared prefixes, such as system prompts; the k-th has frequency 1 / k
    prefix_tokens: int = 0
    mean_turns: float = 1.0  # the number of turns per conversation has a geometric distribution
    think_seconds: float = 0.0  # mean time between two turns


def poisson_times(rng: random.Random, rate: float) -> Iterator[float]:
    """Yield arrivals at `rate` per second."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursty_times(
    rng: random.Random, rate: float, factor: float = 8.0, share: float = 0.1, seconds: float = 5.0
) -> Iterator[float]:
    """Yield arrivals at `rate` per second on average, from a Markov-modulated Poisson process: during bursts, which
    last `seconds` on average and take `share` of the time, the rate is `factor` times as high. Requires factor * share
    < 1."""
    burst_rate = rate * factor
    quiet_rate = rate * (1 - factor * share) / (1 - share)
    now, in_burst = 0.0, False
    changes_at = rng.expovariate(share / (seconds * (1 - share)))
    while True:
        gap = rng.expovariate(burst_rate if in_burst else quiet_rate)
        if now + gap < changes_at:
            now += gap
            yield now
            continue
        now = changes_at
        in_burst = not in_burst
        changes_at += rng.expovariate(1 / seconds if in_burst else share / (seconds * (1 - share)))


def generate_trace(rng: random.Random, times: Iterator[float], number: int, mix: Mix) -> list[TraceRequest]:
    """Return `number` requests in order of arrival. times: arrivals of single requests, and of conversations' first
    turns."""
    weights = [1 / rank for rank in range(1, mix.num_prefixes + 1)]
    trace: list[TraceRequest] = []
    conversation = 0
    while len(trace) < number:
        at = next(times)
        prefix = rng.choices(range(mix.num_prefixes), weights)[0] if weights else None
        num_turns = 1
        while mix.mean_turns > 1 and rng.random() > 1 / mix.mean_turns:
            num_turns += 1
        for turn in range(min(num_turns, number - len(trace))):
            is_first = turn == 0
            trace.append(
                TraceRequest(
                    at=at,
                    output_tokens=mix.output.draw(rng),
                    prompt_tokens=mix.prompt.draw(rng),
                    prefix=prefix if is_first else None,
                    prefix_tokens=mix.prefix_tokens if is_first and prefix is not None else 0,
                    conversation=conversation if num_turns > 1 else None,
                )
            )
            if mix.think_seconds:
                at += rng.expovariate(1 / mix.think_seconds)
        conversation += 1
    return sorted(trace, key=lambda one: one.at)


class PromptBuilder:
    """Builds prompts as token ids. Texts of 4 ids or more differ from their first ids on."""

    def __init__(self, ids: range, seed: int = 0) -> None:
        """ids: the ids to choose from, at least 16."""
        rng = random.Random(seed)
        self._ids = ids
        self._pool = [rng.choice(ids) for _ in range(2**16)]

    def own_text(self, number: int, length: int) -> list[int]:
        """Return the individual tokens of request `number` of the trace."""
        return self._text(0, number, length)

    def prefix_text(self, number: int, length: int) -> list[int]:
        return self._text(1, number, length)

    def _text(self, kind: int, number: int, length: int) -> list[int]:
        base = len(self._ids)
        digits = (kind, number % base, number // base % base, number // base**2 % base)
        text = [self._ids[digit] for digit in digits]
        start = (number * 40_503 + kind) % len(self._pool)
        while len(text) < length:
            text += self._pool[start : start + length - len(text)]
            start = 0
        return text[:length]

    def build(self, number: int, one: TraceRequest, history: list[int]) -> list[int]:
        """Build a prompt. history: the conversation so far, prompts and replies."""
        own = one.prompt_ids or self.own_text(number, one.prompt_tokens)
        prefix = [] if one.prefix is None else self.prefix_text(one.prefix, one.prefix_tokens)
        return history + prefix + own


def check_lengths(trace: Iterable[TraceRequest], max_model_len: int) -> None:
    """Raises ValueError for a request that, with its history, would not fit into `max_model_len` tokens."""
    said: dict[int, int] = {}
    for number, one in enumerate(trace):
        before = 0 if one.conversation is None else said.get(one.conversation, 0)
        total = before + len(one.prompt_ids) + one.prefix_tokens + one.prompt_tokens + one.output_tokens
        if total > max_model_len:
            raise ValueError(f"request {number} has {total} tokens with its history; the model takes {max_model_len}")
        if one.conversation is not None:
            said[one.conversation] = total
