"""Two choices apart from the mechanics: who waits in which order, and how many tokens a step may compute."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from serve_llm.engine.schedule.sequence import Sequence


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class WaitingQueue:
    """Waiting sequences by (priority, arrival); a preempted one keeps its arrival and so goes back to the front."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._items))

    def add(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        del self._items[bisect_left(self._items, sequence.order, key=_order)]


class TokenBudget:
    """Tokens for the next step, from measured speed, so that running streams do not stall behind a long prompt.

    Follows the tokens per second of steps that were large enough to tell, and aims at `target_seconds` a step; at up to
    four times as long where many prompts wait, and then until none does: who starts late in a burst runs when the
    others have ended, in small batches that take as long as large ones. Results do not depend on it (promise 3); only
    their timing does.
    """

    SMALLEST = 64  # tokens: below this a step is mostly fixed cost, and a long prompt would crawl
    MANY_WAITING = 4  # prompts, from which on a step grows

    def __init__(self, limit: int, target_seconds: float | None) -> None:
        """`limit`: most tokens in a step, always kept. `target_seconds` None: always the limit."""
        self._limit = limit
        self._target = target_seconds
        self._tokens_per_second: float | None = None
        self._stretch = 1.0  # times the target

    def next(self, num_waiting: int = 0) -> int:
        """`num_waiting`: sequences that wait for a first chunk."""
        if self._target is None or self._tokens_per_second is None:
            return min(self._limit, 512) if self._target is not None else self._limit
        lasting = self._stretch if num_waiting else 1.0
        self._stretch = max(lasting, min(4.0, num_waiting / self.MANY_WAITING))
        wanted = int(self._stretch * self._target * self._tokens_per_second)
        return max(min(self.SMALLEST, self._limit), min(self._limit, wanted))

    def observe(self, num_tokens: int, seconds: float) -> None:
        if num_tokens < min(self.SMALLEST, self._limit) or seconds <= 0:
            return
        speed = num_tokens / seconds
        old = self._tokens_per_second
        self._tokens_per_second = speed if old is None else 0.7 * old + 0.3 * speed
