"""Measurements of how fast work is done, with exponential decay. Time is passed in."""

from __future__ import annotations

import math

import msgspec

MEMORY_SECONDS = 15.0  # time constant of the decay, in busy time
DECAY_PER_REQUEST = 0.95
ENOUGH_SECONDS = 1.0  # busy time needed before a rate is reported


class Pace(msgspec.Struct):
    """How long recent requests took after their first token, and how many tokens they had."""

    num_whole: float = 0.0  # requests that ended by themselves
    whole_tokens: float = 0.0  # tokens of those
    tokens: float = 0.0  # tokens of all requests
    seconds: float = 0.0  # time of all requests after their first token
    error: float = 0.0  # mean absolute error of seconds per request

    def count(self, num_tokens: int, seconds: float, *, is_whole: bool) -> None:
        """Count an ended request. is_whole: it ended by itself, so num_tokens is its natural length."""
        if self.tokens:
            expected = num_tokens * self.seconds / self.tokens
            self.error = DECAY_PER_REQUEST * self.error + (1 - DECAY_PER_REQUEST) * abs(seconds - expected)
        self.tokens = DECAY_PER_REQUEST * self.tokens + num_tokens
        self.seconds = DECAY_PER_REQUEST * self.seconds + seconds
        if is_whole:
            self.num_whole = DECAY_PER_REQUEST * self.num_whole + 1
            self.whole_tokens = DECAY_PER_REQUEST * self.whole_tokens + num_tokens

    def seconds_for(self, max_tokens: int) -> float:
        """Estimate the seconds from first to last token, plus twice the mean error; 0 without data.

        Assumes the mean length if that is less than max_tokens.
        """
        if not self.tokens:
            return 0.0
        usual_tokens = self.whole_tokens / self.num_whole if self.num_whole else max_tokens
        return min(max_tokens, usual_tokens) * self.seconds / self.tokens + 2 * self.error


class Throughput:
    """Work per busy second. Call `advance` before the queue changes and `count` for finished work."""

    def __init__(self) -> None:
        self._busy_seconds = 0.0
        self._work = 0.0
        self._now: float | None = None  # time given to the last `advance`

    def advance(self, now: float, *, is_busy: bool) -> None:
        """is_busy: work was waiting since the last call. Idle time is skipped, because it says nothing about speed."""
        if is_busy and self._now is not None and now > self._now:
            decay = math.exp((self._now - now) / MEMORY_SECONDS)
            self._busy_seconds = self._busy_seconds * decay + (now - self._now)
            self._work *= decay
        self._now = now

    def count(self, work: float) -> None:
        self._work += work

    @property
    def rate(self) -> float | None:
        """Work per second; None until enough was measured."""
        if self._busy_seconds < ENOUGH_SECONDS or self._work <= 0:
            return None
        return self._work / self._busy_seconds
