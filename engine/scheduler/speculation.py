"""Speculative decoding: which drafts a step verifies for each sequence.

A draft predicts the next output ids. The step computes it together with the newest id and samples after each of its
tokens; it is accepted up to the first id that differs from the sampled one. So drafts change how many steps a text
takes, and nothing else. A step takes longer with drafts, and the first of them costs more than each further one. The
length of a sequence's drafts depends on how often such drafts were accepted and on their cost, measured from the times
of steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from serve_llm.common.types import EngineCoreRequest
from serve_llm.engine.scheduler.acceptance_rates import LONGEST, AcceptanceRates
from serve_llm.engine.scheduler.prompt_lookup import NgramDraft
from serve_llm.engine.scheduler.sequence import Sequence
from serve_llm.engine.scheduler.step_costs import DraftPause, StepCosts

FIRST_RATE = 0.5  # initial acceptance rate
RATE_WEIGHT = 0.15  # weight of the latest draft
EXCESS_WEIGHT = 0.1  # the same for drafts from texts
LEAST_RATE = 0.1  # below this acceptance rate, drafts are not worth a row even if rows are free


class DraftProposer(Protocol):
    """Drafts the continuation of one text, at almost no cost."""

    def propose(self, token_ids: Items[int], count: int) -> NgramDraft:
        """Up to `count` ids that may come next. token_ids: prompt and output so far; they only ever grow."""

    def finish(self, sequence: Sequence) -> None:
        """Record that the text has ended."""


class BatchDraftProposer(Protocol):
    """Drafts the continuations of several texts at once. This takes time: see `step_seconds`."""

    step_seconds: float  # time of one more draft id for all texts; 0 until it is known

    def propose(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence, return at most the given number of ids that may come next."""

    def take_hidden_states(self, sequence: Sequence, start: int, states: bytes) -> None:
        """Receive the served model's hidden states of the tokens from position `start` on; see `RunnerOutput`. Those
        beyond `sequence.num_computed` belong to rejected drafts."""

    def forget(self, request_id: int) -> None:
        """Record that the request has ended."""


@dataclass(slots=True)
class _Drafter(ABC):
    """The drafts of one sequence."""

    proposed: Items[int] = ()  # draft of the ids after the first `num_ids`
    num_ids: int = 0  # length of the sequence when `proposed` was made

    def judge(self, token_ids: Items[int]) -> None:
        """Compare the last draft with the actual ids, whether or not it was verified."""
        for place, (guessed, came) in enumerate(zip(self.proposed, token_ids[self.num_ids :], strict=False)):
            self.learn(place, guessed == came)
            if guessed != came:
                break

    @abstractmethod
    def learn(self, place: int, came_true: bool) -> None:
        """Record whether the id at `place` of the draft was right, given that those before it were."""

    @abstractmethod
    def find_chance(self, place: int) -> float:
        """Return the probability that the id at `place` of the draft is right, given that those before it are."""


@dataclass(slots=True)
class _ModelDrafter(_Drafter):
    rate: float = FIRST_RATE  # recent acceptance rate of its drafts

    def learn(self, place: int, came_true: bool) -> None:
        self.rate += RATE_WEIGHT * (came_true - self.rate)

    def find_chance(self, place: int) -> float:
        return self.rate


@dataclass(slots=True, kw_only=True)
class _TextDrafter(_Drafter):
    proposer: DraftProposer
    rates: AcceptanceRates  # shared by all sequences
    match_length: int = 0  # ids that the draft follows
    next_lookup: int = 0  # length of the sequence at which to look for the next draft
    excess: float = 0.0  # recent acceptance rate of its drafts, minus that in `rates`
    is_verifying: bool = False  # whether `proposed` is verified by a step
    num_failures: int = 0  # log2 of the next wait: drafts without an accepted id, minus those with one, in limits

    def learn(self, place: int, came_true: bool) -> None:
        length = self.match_length + place
        self.excess += EXCESS_WEIGHT * (came_true - self.rates.find_rate(length) - self.excess)
        self.rates.observe(length, came_true)

    def find_chance(self, place: int) -> float:
        return max(0.0, self.rates.find_rate(self.match_length + place) + min(0.0, self.excess))


class Speculator(ABC):
    """Chooses drafts for the sequences of a scheduler. Its choices do not affect outputs."""

    WASTE_WEIGHT = 1.0  # weight of wasted time relative to saved time
    _drafters: Mapping[int, _Drafter]  # by request id

    def __init__(self, num_tokens: int, max_sequences: int | None = None) -> None:
        """num_tokens: most drafts of a sequence in a step. max_sequences: running and waiting sequences beyond
        which there are no drafts."""
        self.num_tokens = num_tokens
        self._max_sequences = max_sequences
        self.has_too_many = False  # there are too many sequences for drafts
        self.costs = StepCosts()
        self.paused_indices: Collection[int] = ()  # request indices that get no drafts for now
        self._num_drafting = 0  # sequences with drafts in the step being scheduled
        self._num_drafting_before = 0  # sequences with drafts in the previous step

    @abstractmethod
    def update(self, sequence: Sequence) -> None:
        """Process the sequence's new ids."""

    def take_hidden_states(self, sequence: Sequence, start: int, states: bytes) -> None:
        """See `BatchDraftProposer`. Only called for proposers that read them."""
        raise NotImplementedError

    def prepare(self, ready: Iterable[tuple[Sequence, int]], num_running: int, num_waiting: int = 0) -> None:
        """Make drafts before a step is scheduled. ready: sequences that the step may compute, with the maximum number
        of drafts of each. num_running: sequences that share the steps. num_waiting: sequences that may join them: not
        those of batches, unless they run alone."""
        self._num_drafting_before = self._num_drafting
        self._num_drafting = 0
        self.has_too_many = self._max_sequences is not None and num_running + num_waiting > self._max_sequences

    def observe_step(self, num_sequences: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Record a step that computed newest ids and drafts only."""
        self.costs.observe(num_sequences, num_drafts, seconds)

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """Record that the request has ended."""

    @abstractmethod
    def has_drafts(self, sequence: Sequence, num_running: int) -> bool:
        """Whether there are, or will be, drafts for the sequence's next ids that are worth their cost."""

    def choose(self, sequence: Sequence, most: int, num_running: int) -> list[int]:
        """Choose up to `most` drafts to verify: those accepted often enough to be worth their cost."""
        drafts = self._find_drafts(sequence, most, num_running)
        self._num_drafting += bool(drafts)
        return drafts

    def _find_drafts(self, sequence: Sequence, most: int, num_running: int) -> list[int]:
        drafter = self._drafters.get(sequence.request.id)
        if drafter is None or not drafter.proposed or drafter.num_ids != len(sequence.token_ids):
            return []
        if not self._may_draft(sequence):
            return []
        most = min(most, len(drafter.proposed))
        fixed_cost = 0.0 if self._num_drafting else self._find_fixed_cost(num_running, self._num_drafting_before)
        return list(drafter.proposed[: self._count_worthwhile(drafter.find_chance, most, num_running, fixed_cost)])

    def _may_draft(self, sequence: Sequence) -> bool:
        if self.has_too_many or self.costs.is_comparison_due:
            return False
        return sequence.req_index not in self.paused_indices

    def _find_fixed_cost(self, num_running: int, num_drafting: int) -> float:
        """Return the fixed cost that the next sequence with drafts must pay. The first one in a step pays for the extra
        time of a step with drafts; if several had drafts in the previous step, it pays only its share, because they
        will probably have drafts again."""
        return self.costs.find_fixed_cost(num_running) / max(1, num_drafting)

    def _count_worthwhile(
        self, find_chance: Callable[[int], float], most: int, num_running: int, fixed_cost: float
    ) -> int:
        """Return how many drafts, up to `most`, are accepted often enough to pay for themselves and, together, for
        `fixed_cost`. find_chance: of a draft, if those before it are accepted."""
        cost = self._find_cost(num_running)
        left = fixed_cost
        chance = 1.0
        count = 0
        while count < most:
            chance *= find_chance(count)
            gain = chance * (1.0 - cost) - self.WASTE_WEIGHT * (1.0 - chance) * cost
            if gain < 0.0 or chance < LEAST_RATE:
                break
            left -= gain
            count += 1
        return count if left <= 0.0 else 0

    def _find_cost(self, num_running: int) -> float:
        """The cost of a draft as a share of the cost of an id in a step without drafts."""
        return self.costs.find_draft_cost(num_running)


class TextSpeculator(Speculator):
    """Drafts from the texts themselves, which costs little.

    Drafts after longer matches are accepted more often, and the rates are learned from all sequences. A sequence whose
    own drafts do worse gets fewer. Rejected drafts delay the sequences that have none, so a draft must be expected to
    save several times the time that it is expected to waste. A match grows by one with each id, so after a short one
    there is no lookup until it may be long enough. After drafts of which nothing was accepted, a sequence has none for
    a number of ids that doubles, so that misleading text costs little even if the costs are wrong.
    """

    WASTE_WEIGHT = 4.0
    MOST_SKIPPED = 8  # ids without a lookup
    MOST_FAILURES = 6  # beyond which the wait does not grow: so that each draft that comes true still halves it
    REVIEW_STEPS = 16  # steps after which the shortest useful match is determined again

    def __init__(
        self,
        num_tokens: int,
        build_proposer: Callable[[EngineCoreRequest], DraftProposer],
        clock: Callable[[], float],
        max_sequences: int | None = None,
    ) -> None:
        """build_proposer: makes the proposer of one sequence. clock: returns seconds."""
        super().__init__(num_tokens, max_sequences)
        self._drafters: dict[int, _TextDrafter] = {}
        self._build_proposer = build_proposer
        self._clock = clock
        self._rates = AcceptanceRates()
        self._pause = DraftPause()
        self._lookup_seconds = 0.0  # since the last step
        self._num_steps = 0
        self._least_length = 1  # the length of matches that are worth drafts

    def update(self, sequence: Sequence) -> None:
        if not sequence.num_output or self.has_too_many:
            return
        drafter = self._drafters.get(sequence.request.id)
        if drafter is None:  # also in a pause, because its proposer keeps the text for later ones
            drafter = _TextDrafter(proposer=self._build_proposer(sequence.request), rates=self._rates)
            self._drafters[sequence.request.id] = drafter
        if drafter.is_verifying and len(sequence.token_ids) > drafter.num_ids:
            self._settle(drafter, sequence.token_ids)
        if not self._pause.is_on and len(sequence.token_ids) >= drafter.next_lookup:
            started_at = self._clock()
            self._look_up(drafter, sequence.token_ids)
            self._lookup_seconds += self._clock() - started_at

    def _settle(self, drafter: _TextDrafter, token_ids: Items[int]) -> None:
        """Wait before the next lookup if nothing was accepted."""
        drafter.is_verifying = False
        if drafter.proposed[0] == token_ids[drafter.num_ids]:
            drafter.num_failures = max(0, drafter.num_failures - 1)
            return
        drafter.num_failures = min(self.MOST_FAILURES, drafter.num_failures + 1)
        drafter.next_lookup = len(token_ids) + 2**drafter.num_failures

    def _look_up(self, drafter: _TextDrafter, token_ids: Items[int]) -> None:
        if drafter.proposed:
            drafter.judge(token_ids)
        drafter.proposed, drafter.match_length = drafter.proposer.propose(token_ids, self.num_tokens)
        drafter.num_ids = len(token_ids)
        num_missing = self._least_length - drafter.match_length
        drafter.next_lookup = drafter.num_ids + max(1, min(self.MOST_SKIPPED, num_missing))

    def choose(self, sequence: Sequence, most: int, num_running: int) -> list[int]:
        drafts = super().choose(sequence, most, num_running)
        if drafts:
            self._drafters[sequence.request.id].is_verifying = True
        return drafts

    def observe_step(self, num_sequences: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        if not num_drafts and (self.has_too_many or self._pause.skip_step()):
            return
        cost = self.costs.observe(num_sequences, num_drafts, seconds)
        step_seconds = self.costs.find_step_seconds()
        if step_seconds > 0.0:
            cost += self._lookup_seconds / step_seconds
        self._lookup_seconds = 0.0
        self._pause.observe(num_accepted / num_sequences, cost, num_drafts > 0)
        self._num_steps += 1
        if self._num_steps % self.REVIEW_STEPS == 0:
            self._least_length = self._find_least_length(num_sequences)

    def _find_least_length(self, num_running: int) -> int:
        fixed_cost = self._find_fixed_cost(num_running, self._num_drafting)
        for length in range(1, LONGEST):
            find_chance = partial(self._rates.find_later_rate, length)
            if self._count_worthwhile(find_chance, self.num_tokens, num_running, fixed_cost):
                return length
        return LONGEST

    def forget(self, sequence: Sequence) -> None:
        drafter = self._drafters.pop(sequence.request.id, None)
        if drafter is not None:
            drafter.proposer.finish(sequence)

    def has_drafts(self, sequence: Sequence, num_running: int) -> bool:
        return bool(self._find_drafts(sequence, self.num_tokens, num_running))

    def _may_draft(self, sequence: Sequence) -> bool:
        return not self._pause.is_on and super()._may_draft(sequence)


class ModelSpeculator(Speculator):
    """Drafts with another model if that pays off: a draft id costs a step of that model in addition to the row."""

    RATE_MEMORY = 0.98  # weight of the rate so far, over all sequences, relative to one new comparison
    TRIAL_IDS = 32  # make a draft after this many ids without one, so that a low rate can recover

    def __init__(self, num_tokens: int, proposer: BatchDraftProposer, max_sequences: int | None = None) -> None:
        super().__init__(num_tokens, max_sequences)
        self._drafters: dict[int, _ModelDrafter] = {}
        self._proposer = proposer
        self._mean_rate = FIRST_RATE  # mean over all sequences, used as the initial rate of a new one

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

    def prepare(self, ready: Iterable[tuple[Sequence, int]], num_running: int, num_waiting: int = 0) -> None:
        super().prepare(ready, num_running, num_waiting)
        drafters = []
        wanted = []
        for sequence, most in ready:
            drafter = self._drafters.get(sequence.request.id)
            if drafter is None or not self._may_draft(sequence):
                continue
            if drafter.proposed and drafter.num_ids == len(sequence.token_ids):
                continue
            count = self._count_guesses(drafter, sequence, min(most, self.num_tokens), num_running)
            if count:
                drafters.append(drafter)
                wanted.append((sequence, count))
        if not wanted:
            return
        for drafter, (sequence, _), proposed in zip(drafters, wanted, self._proposer.propose(wanted), strict=True):
            if proposed:
                drafter.proposed = proposed
                drafter.num_ids = len(sequence.token_ids)

    def take_hidden_states(self, sequence: Sequence, start: int, states: bytes) -> None:
        self._proposer.take_hidden_states(sequence, start, states)

    def has_drafts(self, sequence: Sequence, num_running: int) -> bool:
        drafter = self._drafters.get(sequence.request.id)
        if drafter is None or not self._may_draft(sequence):
            return False
        return self._count_guesses(drafter, sequence, self.num_tokens, num_running) > 0

    def _count_guesses(self, drafter: _Drafter, sequence: Sequence, most: int, num_running: int) -> int:
        fixed_cost = self._find_fixed_cost(num_running, self._num_drafting_before)
        count = self._count_worthwhile(drafter.find_chance, most, num_running, fixed_cost)
        is_trial_due = len(sequence.token_ids) - drafter.num_ids >= self.TRIAL_IDS
        return count or min(most, int(is_trial_due))

    def forget(self, sequence: Sequence) -> None:
        self._drafters.pop(sequence.request.id, None)
        self._proposer.forget(sequence.request.id)

    def _find_cost(self, num_running: int) -> float:
        """Add the cost of a step of the proposer."""
        step_seconds = self.costs.find_step_seconds()
        share = self._proposer.step_seconds / step_seconds if step_seconds > 0.0 else 0.0
        return super()._find_cost(num_running) + share
