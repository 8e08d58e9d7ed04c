"""Speculative decoding: which drafts a step verifies for each sequence.

A draft is a guess of the next output ids. The step computes it together with the newest id and samples after each of
its tokens; it is accepted up to the first id that differs from the sampled one. So drafts change how many steps a text
takes, and nothing else. A draft costs a row of a step: the length of a sequence's drafts follows how often such guesses
have come true, and what a row costs, from the times of steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from serve_llm.common.types import Request
from serve_llm.engine.scheduler.match_rates import MatchRates
from serve_llm.engine.scheduler.prompt_lookup import TextGuess
from serve_llm.engine.scheduler.sequence import Sequence

FIRST_RATE = 0.5  # initial acceptance rate
RATE_WEIGHT = 0.15  # weight of the latest guess
EXCESS_WEIGHT = 0.1  # the same for guesses from texts
LEAST_RATE = 0.1  # below this acceptance rate, guesses are not worth a row even if rows are free


class DraftSource(Protocol):
    """Drafts the continuation of one text, at almost no cost."""

    def propose(self, token_ids: Items[int], count: int) -> TextGuess:
        """Up to `count` ids that may come next. token_ids: prompt and output so far; they only ever grow."""

    def finish(self, sequence: Sequence) -> None:
        """The text ends."""


class BatchDraftSource(Protocol):
    """Drafts the continuations of several texts at once. This takes time: see `step_seconds`."""

    step_seconds: float  # time of one more guess for all texts; 0 until it is known

    def propose(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence, return at most the given number of ids that may come next."""

    def take_hidden_states(self, sequence: Sequence, start: int, states: bytes) -> None:
        """Receive the served model's hidden states of the tokens from position `start` on; see `RunnerOutput`. Those
        beyond `sequence.num_computed` belong to rejected drafts."""

    def forget(self, request_id: int) -> None:
        """The request has ended."""


@dataclass(slots=True)
class _Drafter(ABC):
    """The guesses of one sequence."""

    proposed: Items[int] = ()  # guesses of the ids after the first `num_ids`
    num_ids: int = 0  # length of the sequence when `proposed` was made

    def judge(self, token_ids: Items[int]) -> None:
        """Compare the last guess with the actual ids, whether or not it was verified as a draft."""
        for place, (guessed, came) in enumerate(zip(self.proposed, token_ids[self.num_ids :], strict=False)):
            self.learn(place, guessed == came)
            if guessed != came:
                break

    @abstractmethod
    def learn(self, place: int, came_true: bool) -> None:
        """Record whether the id at `place` of the guess came, after those before it."""

    @abstractmethod
    def find_chance(self, place: int) -> float:
        """How probable it is that the id at `place` of the guess comes, after those before it."""


@dataclass(slots=True)
class _ModelDrafter(_Drafter):
    rate: float = FIRST_RATE  # recent acceptance rate of its guesses

    def learn(self, place: int, came_true: bool) -> None:
        self.rate += RATE_WEIGHT * (came_true - self.rate)

    def find_chance(self, place: int) -> float:
        return self.rate


@dataclass(slots=True, kw_only=True)
class _TextDrafter(_Drafter):
    source: DraftSource
    rates: MatchRates  # shared by all sequences
    match_length: int = 0  # ids that the guess follows
    excess: float = 0.0  # recent acceptance rate of its guesses, minus what `rates` say

    def learn(self, place: int, came_true: bool) -> None:
        length = self.match_length + place
        self.excess += EXCESS_WEIGHT * (came_true - self.rates.find_rate(length) - self.excess)
        self.rates.observe(length, came_true)

    def find_chance(self, place: int) -> float:
        return max(0.0, self.rates.find_rate(self.match_length + place) + min(0.0, self.excess))


class RowCost:
    """Estimates the cost of one more row in a decode step: the slope of a line fitted to the latest step times."""

    MEMORY = 0.98  # weight of a step relative to the next one
    UNKNOWN = 0.2  # until steps of different sizes have been seen
    MOST_SLOWER = 3.0  # limit on a step's time as a multiple of the mean

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = 0.0
        self._seconds = 0.0
        self._rows_squared = 0.0
        self._rows_seconds = 0.0
        self._shares: dict[int, float] = {}  # what `share` has found since the last step

    def observe(self, num_rows: int, seconds: float) -> None:
        """Take in a step of `num_rows` tokens, all of them newest ids or drafts."""
        self._shares.clear()
        if self._weight:  # another process on the machine may hold up a step: that is not what its rows cost
            seconds = min(seconds, self.MOST_SLOWER * self._seconds / self._weight)
        self._weight = self.MEMORY * self._weight + 1.0
        self._rows = self.MEMORY * self._rows + num_rows
        self._seconds = self.MEMORY * self._seconds + seconds
        self._rows_squared = self.MEMORY * self._rows_squared + num_rows**2
        self._rows_seconds = self.MEMORY * self._rows_seconds + num_rows * seconds

    def share(self, num_rows: int) -> float:
        """A row's cost relative to the cost of each id in a step of `num_rows` without drafts, 0 to 1."""
        if num_rows not in self._shares:
            self._shares[num_rows] = self._find_share(num_rows)
        return self._shares[num_rows]

    def _find_share(self, num_rows: int) -> float:
        slope = self._find_slope()
        if slope is None:
            return self.UNKNOWN
        if slope <= 0.0:
            return 0.0
        step_seconds = self.find_step_seconds(num_rows)
        return min(1.0, slope * num_rows / step_seconds) if step_seconds > 0.0 else 1.0

    def find_step_seconds(self, num_rows: int) -> float:
        """Return the seconds of a step of `num_rows` rows; 0 until they are known."""
        if not self._weight:
            return 0.0
        rows = self._rows / self._weight
        return self._seconds / self._weight + (self._find_slope() or 0.0) * (num_rows - rows)

    def _find_slope(self) -> float | None:
        """Return the seconds that one more row takes; None until steps of different sizes have been seen."""
        if not self._weight:
            return None
        rows = self._rows / self._weight
        variance = self._rows_squared / self._weight - rows**2
        if variance < 0.1:
            return None
        return (self._rows_seconds / self._weight - rows * self._seconds / self._weight) / variance


class Speculator(ABC):
    """Chooses drafts for the sequences of a scheduler. Its choices do not affect outputs."""

    _drafters: Mapping[int, _Drafter]  # by request id

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: most drafts of a sequence in a step."""
        self.num_tokens = num_tokens
        self.row_cost = RowCost()
        self.paused_indices: Collection[int] = ()  # request indices that get no drafts for now

    @abstractmethod
    def update(self, sequence: Sequence) -> None:
        """Process the sequence's new ids."""

    def take_hidden_states(self, sequence: Sequence, start: int, states: bytes) -> None:
        """See `BatchDraftSource`. Only called for sources that read them."""
        raise NotImplementedError

    @abstractmethod
    def prepare(self, ready: Items[tuple[Sequence, int]], num_running: int) -> None:
        """Make guesses before a step is scheduled. ready: sequences that the step may compute, with the maximum number
        of drafts of each. num_running: sequences that share the steps."""

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """The request has ended."""

    @abstractmethod
    def has_drafts(self, sequence: Sequence, num_running: int) -> bool:
        """Whether there are, or will be, drafts for the sequence's next ids that are worth their rows."""

    def choose(self, sequence: Sequence, most: int, num_running: int) -> list[int]:
        """Choose up to `most` drafts to verify: those accepted often enough to be worth their rows."""
        drafter = self._find_drafter(sequence)
        if drafter is None or not drafter.proposed or drafter.num_ids != len(sequence.token_ids):
            return []
        most = min(most, len(drafter.proposed))
        return list(drafter.proposed[: self._count_worthwhile(drafter, most, num_running)])

    def _find_drafter(self, sequence: Sequence) -> _Drafter | None:
        return None if sequence.req_index in self.paused_indices else self._drafters.get(sequence.request.id)

    def _count_worthwhile(self, drafter: _Drafter, most: int, num_running: int) -> int:
        """Return up to `most` drafts, each of which is accepted often enough to pay for its row."""
        least_chance = max(LEAST_RATE, self._find_least_chance(num_running))
        chance = 1.0
        for place in range(most):
            chance *= drafter.find_chance(place)
            if chance < least_chance:
                return place
        return most

    @abstractmethod
    def _find_least_chance(self, num_running: int) -> float:
        """How probable it must be that a draft is accepted."""


class TextSpeculator(Speculator):
    """Always drafts, from the texts themselves, because that costs almost nothing.

    Guesses after longer matches come true more often, and how often is learned from all sequences. A sequence whose
    own guesses do worse gets fewer drafts. Rejected drafts delay the sequences that have none, so a draft must be
    expected to save several times the time that it is expected to waste.
    """

    LEAST_GAIN = 4.0  # time that a draft saves if it is accepted, times its chance, as a multiple of the waste

    def __init__(self, num_tokens: int, build_source: Callable[[Request], DraftSource]) -> None:
        """build_source: makes the source of one sequence."""
        super().__init__(num_tokens)
        self._drafters: dict[int, _TextDrafter] = {}
        self._build_source = build_source
        self._rates = MatchRates()

    def update(self, sequence: Sequence) -> None:
        if not sequence.num_output:
            return
        drafter = self._drafters.get(sequence.request.id)
        if drafter is None:
            drafter = _TextDrafter(source=self._build_source(sequence.request), rates=self._rates)
            self._drafters[sequence.request.id] = drafter
        token_ids = sequence.token_ids
        if drafter.proposed:
            drafter.judge(token_ids)
        drafter.proposed, drafter.match_length = drafter.source.propose(token_ids, self.num_tokens)
        drafter.num_ids = len(token_ids)

    def prepare(self, ready: Items[tuple[Sequence, int]], num_running: int) -> None:
        """Guesses are made when ids arrive."""

    def forget(self, sequence: Sequence) -> None:
        drafter = self._drafters.pop(sequence.request.id, None)
        if drafter is not None:
            drafter.source.finish(sequence)

    def has_drafts(self, sequence: Sequence, num_running: int) -> bool:
        return bool(self.choose(sequence, 1, num_running))

    def _find_least_chance(self, num_running: int) -> float:
        """An accepted draft saves what an id costs without drafts, less its row; a rejected one wastes its row."""
        cost = self.row_cost.share(num_running)
        waste = self.LEAST_GAIN * cost
        return waste / (1.0 - cost + waste)


class ModelSpeculator(Speculator):
    """Drafts with another model, if that pays: a guess costs a step of that model in addition to the row."""

    RATE_MEMORY = 0.98  # weight of the rate so far, over all sequences, against one new comparison
    TRIAL_IDS = 32  # make a guess after this many ids without one, so that a low rate can recover

    def __init__(self, num_tokens: int, source: BatchDraftSource) -> None:
        super().__init__(num_tokens)
        self._drafters: dict[int, _ModelDrafter] = {}
        self._source = source
        self._mean_rate = FIRST_RATE  # mean over all sequences, the initial rate of a new one

    def update(self, sequence: Sequence) -> None:
        if not sequence.num_output:
            return
        drafter = self._drafters.get(sequence.request.id)
        if drafter is None:
            drafter = self._drafters[sequence.request.id] = _ModelDrafter(rate=self._mean_rate)
        if drafter.proposed:
            drafter.judge(sequence.token_ids)
            self._mean_rate = self.RATE_MEMORY * self._mean_rate + (1.0 - self.RATE_MEMORY) * drafter.rate
            drafter.proposed = ()
            drafter.num_ids = len(sequence.token_ids)

    def prepare(self, ready: Items[tuple[Sequence, int]], num_running: int) -> None:
        drafters = []
        wanted = []
        for sequence, most in ready:
            drafter = self._find_drafter(sequence)
            if drafter is None or (drafter.proposed and drafter.num_ids == len(sequence.token_ids)):
                continue
            count = self._count_guesses(drafter, sequence, min(most, self.num_tokens), num_running)
            if count:
                drafters.append(drafter)
                wanted.append((sequence, count))
        if not wanted:
            return
        for drafter, (sequence, _), proposed in zip(drafters, wanted, self._source.propose(wanted), strict=True):
            if proposed:
                drafter.proposed = proposed
                drafter.num_ids = len(sequence.token_ids)

    def take_hidden_states(self, sequence: Sequence, start: int, states: bytes) -> None:
        self._source.take_hidden_states(sequence, start, states)

    def has_drafts(self, sequence: Sequence, num_running: int) -> bool:
        drafter = self._find_drafter(sequence)
        return drafter is not None and self._count_guesses(drafter, sequence, 1, num_running) > 0

    def _count_guesses(self, drafter: _Drafter, sequence: Sequence, most: int, num_running: int) -> int:
        count = self._count_worthwhile(drafter, most, num_running)
        is_trial_due = len(sequence.token_ids) - drafter.num_ids >= self.TRIAL_IDS
        return count or min(most, int(is_trial_due))

    def forget(self, sequence: Sequence) -> None:
        self._drafters.pop(sequence.request.id, None)
        self._source.forget(sequence.request.id)

    def _find_least_chance(self, num_running: int) -> float:
        """The cost of a draft as a share of the cost of an id in a step without drafts."""
        step_seconds = self.row_cost.find_step_seconds(num_running)
        share = self._source.step_seconds / step_seconds if step_seconds > 0.0 else 0.0
        return self.row_cost.share(num_running) + share
