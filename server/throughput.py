"""How fast work is done, measured and forgotten slowly. No clock of its own."""

from __future__ import annotations

import math

MEMORY_SECONDS = 15.0  # of busy time: what is older than that counts little
KEPT = 0.95  # of what is known, when one more request ends
ENOUGH_SECONDS = 1.0  # of busy time, before which there is nothing to go by


class Pace:
    """How long requests go on after their first token: seconds per token, and tokens, of the latest ones."""

    def __init__(self) -> None:
        self._requests = self._whole_tokens = 0.0  # of those that ended by themselves
        self._tokens = self._seconds = self._error = 0.0

    def count(self, num_tokens: int, seconds: float, *, is_whole: bool) -> None:
        """A request has ended. `is_whole`: by itself. Others would have had more tokens."""
        if self._tokens:
            expected = num_tokens * self._seconds / self._tokens
            self._error = KEPT * self._error + (1 - KEPT) * abs(seconds - expected)
        self._tokens = KEPT * self._tokens + num_tokens
        self._seconds = KEPT * self._seconds + seconds
        if is_whole:
            self._requests = KEPT * self._requests + 1
            self._whole_tokens = KEPT * self._whole_tokens + num_tokens

    def seconds_for(self, max_tokens: int) -> float:
        """What a request that may generate so many will hardly exceed: it may as well stop as early as others do."""
        if not self._tokens:
            return 0.0
        usual = self._whole_tokens / self._requests if self._requests else max_tokens
        return min(max_tokens, usual) * self._seconds / self._tokens + 2 * self._error


class Throughput:
    """Work per second while there is some to do. Call `advance` before anything changes, `count` for what was done."""

    def __init__(self) -> None:
        self._busy = 0.0  # seconds
        self._done = 0.0
        self._now: float | None = None

    def advance(self, now: float, *, is_busy: bool) -> None:
        """`is_busy`: something waited since the last call. Time in which nothing did says nothing about speed."""
        if is_busy and self._now is not None and now > self._now:
            decay = math.exp((self._now - now) / MEMORY_SECONDS)
            self._busy = self._busy * decay + (now - self._now)
            self._done *= decay
        self._now = now

    def count(self, work: float) -> None:
        self._done += work

    @property
    def rate(self) -> float | None:
        """Work per second; None until enough was seen."""
        return self._done / self._busy if self._busy >= ENOUGH_SECONDS and self._done > 0 else None
