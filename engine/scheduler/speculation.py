"""Speculative decoding: which drafts a step verifies for each sequence.

A draft is a guess of the next output ids. The step computes it together with the newest id and samples after each of
its tokens; it is accepted as far as it is what was sampled. So drafts change how many steps a text takes, and nothing
else. A draft costs a row of a step: the length of a sequence's drafts follows how often its guesses have come true, and
what a row costs, from the times of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from serve_llm.engine.scheduler.sequence import Sequence

FIRST_RATE = 0.5  # assumed share of guesses that come true
RATE_WEIGHT = 0.15  # how much the latest guess counts
LEAST_RATE = 0.1  # fewer guesses that come true are not worth a row, even if rows cost nothing


class DraftSource(Protocol):
    """Guesses how one text goes on."""

    def propose(self, token_ids: Items[int], count: int) -> list[int]:
        """Up to `count` ids that may come next. token_ids: prompt and output so far; they only ever grow."""


@dataclass(slots=True)
class _Drafter:
    """The guesses of one sequence."""

    source: DraftSource
    proposed: list[int]  # what may follow the ids so far
    num_ids: int  # length of the sequence when `proposed` was made
    rate: float = FIRST_RATE  # share of its guesses that have come true, of late

    def update(self, token_ids: Items[int], max_drafts: int) -> None:
        """Judge the last guess by the ids that came, whether or not it was a draft, and make the next one."""
        for guessed, came in zip(self.proposed, token_ids[self.num_ids :], strict=False):
            self.rate += RATE_WEIGHT * ((guessed == came) - self.rate)
            if guessed != came:
                break
        self.proposed = self.source.propose(token_ids, max_drafts)
        self.num_ids = len(token_ids)


class RowCost:
    """What a row more costs in a step of decoding: a line through the times of the latest steps."""

    MEMORY = 0.98  # weight of a step in comparison with the next one
    UNKNOWN = 0.2  # until steps of different sizes have been seen
    MOST_SLOWER = 3.0  # times the mean that a step counts at most

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = 0.0
        self._seconds = 0.0
        self._rows_squared = 0.0
        self._rows_seconds = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Take in a step of `num_rows` tokens, all of them newest ids or drafts."""
        if self._weight:  # another process on the machine may hold up a step: that is not what its rows cost
            seconds = min(seconds, self.MOST_SLOWER * self._seconds / self._weight)
        self._weight = self.MEMORY * self._weight + 1.0
        self._rows = self.MEMORY * self._rows + num_rows
        self._seconds = self.MEMORY * self._seconds + seconds
        self._rows_squared = self.MEMORY * self._rows_squared + num_rows**2
        self._rows_seconds = self.MEMORY * self._rows_seconds + num_rows * seconds

    def share(self, num_rows: int) -> float:
        """A row's cost as a share of what each id costs in a step of `num_rows` without drafts, 0 to 1."""
        if not self._weight:
            return self.UNKNOWN
        rows = self._rows / self._weight
        seconds = self._seconds / self._weight
        variance = self._rows_squared / self._weight - rows**2
        if variance < 0.1:
            return self.UNKNOWN
        slope = (self._rows_seconds / self._weight - rows * seconds) / variance
        step_seconds = seconds + slope * (num_rows - rows)
        if slope <= 0.0:
            return 0.0
        return min(1.0, slope * num_rows / step_seconds) if step_seconds > 0.0 else 1.0


class Speculator:
    """Chooses drafts for the sequences of a scheduler. Outputs do not depend on what it chooses."""

    def __init__(self, num_tokens: int, build_source: Callable[[], DraftSource]) -> None:
        """num_tokens: most drafts of a sequence in a step. build_source: makes the source of one sequence."""
        self.num_tokens = num_tokens
        self._build_source = build_source
        self._drafters: dict[int, _Drafter] = {}  # by request id
        self.row_cost = RowCost()
        self.paused_indices: Collection[int] = ()  # request indices that get no drafts for now

    def update(self, sequence: Sequence) -> None:
        """Take in the ids that the sequence has by now."""
        sampling = sequence.sampling
        if not sequence.num_output or (sampling.thinking is not None and not sampling.grammar):
            return  # the end of its reasoning is no grammar that drafts could be checked by
        drafter = self._drafters.get(sequence.request.id)
        if drafter is None:
            drafter = self._drafters[sequence.request.id] = _Drafter(self._build_source(), [], 0)
        drafter.update(sequence.token_ids, self.num_tokens)

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._drafters.pop(request_id, None)

    def has_drafts(self, sequence: Sequence, num_running: int) -> bool:
        """Whether there are drafts for the ids after those of the sequence that are worth their rows."""
        return bool(self.choose(sequence, 1, num_running))

    def choose(self, sequence: Sequence, most: int, num_running: int) -> list[int]:
        """Up to `most` drafts to verify: each is worth its row if it comes true often enough.

        num_running: sequences that share the steps.
        """
        drafter = self._drafters.get(sequence.request.id)
        if drafter is None or sequence.req_index in self.paused_indices:
            return []
        least_rate = max(LEAST_RATE, self.row_cost.share(num_running))
        count = 0
        rate = drafter.rate
        while count < most and rate >= least_rate:
            count += 1
            rate *= drafter.rate
        return drafter.proposed[:count]
