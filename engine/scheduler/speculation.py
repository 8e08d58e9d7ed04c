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
from functools import partial
from typing import Protocol

from serve_llm.common.types import EngineCoreRequest
from serve_llm.engine.scheduler.acceptance_rates import LONGEST
from serve_llm.engine.scheduler.drafters import FIRST_RATE, Drafter, DraftProposer, ModelDrafter, TextDrafters
from serve_llm.engine.scheduler.sequence import Sequence
from serve_llm.engine.scheduler.step_costs import DraftPause, StepCosts

MIN_RATE = 0.1  # below this acceptance rate, drafts are not worth a row even if rows are free


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


class Speculator(ABC):
    """Chooses drafts for the sequences of a scheduler. Its choices do not affect outputs."""

    WASTE_WEIGHT = 1.0  # weight of wasted time relative to saved time
    REVIEW_STEPS = 16  # steps after which the shortest useful match is determined again
    _drafters: Mapping[int, Drafter]  # by request id

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

    def are_looked_up(self, sequence: Sequence) -> bool:
        """Whether the last verified drafts were found by prompt lookup although there is a draft model."""
        return False

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
        if drafter is None or not drafter.has_draft(sequence) or not self._may_draft(sequence):
            return []
        most = min(most, len(drafter.proposed))
        cost = self._find_cost(num_running)
        fixed_cost = 0.0 if self._num_drafting else self._find_fixed_cost(num_running, self._num_drafting_before)
        count, _ = count_worthwhile(drafter.find_acceptance, most, cost, fixed_cost, self.WASTE_WEIGHT)
        return list(drafter.proposed[:count])

    def _may_draft(self, sequence: Sequence) -> bool:
        if self.has_too_many or self.costs.is_comparison_due:
            return False
        return sequence.req_index not in self.paused_indices

    def _find_fixed_cost(self, num_running: int, num_drafting: int) -> float:
        """Return the fixed cost that the next sequence with drafts must pay. The first one in a step pays for the extra
        time of a step with drafts; if several had drafts in the previous step, it pays only its share, because they
        will probably have drafts again."""
        return self.costs.find_fixed_cost(num_running) / max(1, num_drafting)

    def _find_cost(self, num_running: int) -> float:
        """The cost of a draft as a share of the cost of an id in a step without drafts."""
        return self.costs.find_draft_cost(num_running)


def count_worthwhile(
    find_acceptance: Callable[[int], float], most: int, cost: float, fixed_cost: float, waste_weight: float
) -> tuple[int, float]:
    """Return how many drafts, up to `most`, are accepted often enough to pay for themselves and, together, for
    `fixed_cost`; and how many ids' time they are expected to save.

    find_acceptance: the probability that a draft is accepted if those before it are. cost: of a draft. waste_weight: of
    wasted time relative to saved time, when each draft is judged.
    """
    left = fixed_cost
    saved = -fixed_cost
    chance = 1.0
    count = 0
    while count < most:
        chance *= find_acceptance(count)
        gain = chance * (1.0 - cost) - waste_weight * (1.0 - chance) * cost
        if gain < 0.0 or chance < MIN_RATE:
            break
        left -= gain
        saved += chance - cost
        count += 1
    return (count, saved) if left <= 0.0 else (0, 0.0)


class TextSpeculator(Speculator):
    """Drafts from the texts themselves, which costs little.

    Drafts after longer matches are accepted more often, and the rates are learned from all sequences. A sequence whose
    own drafts do worse gets fewer. Rejected drafts delay the sequences that have none, so a draft must be expected to
    save several times the time that it is expected to waste. See also `TextDrafters`.
    """

    WASTE_WEIGHT = 4.0

    def __init__(
        self,
        num_tokens: int,
        build_proposer: Callable[[EngineCoreRequest], DraftProposer],
        clock: Callable[[], float],
        max_sequences: int | None = None,
    ) -> None:
        """build_proposer: makes the proposer of one sequence. clock: returns seconds."""
        super().__init__(num_tokens, max_sequences)
        self.texts = TextDrafters(num_tokens, build_proposer, clock)
        self._drafters = self.texts.by_request
        self._pause = DraftPause()
        self._num_steps = 0

    def update(self, sequence: Sequence) -> None:
        if sequence.num_output and not self.has_too_many:
            self.texts.update(sequence, is_paused=self._pause.is_on)

    def choose(self, sequence: Sequence, most: int, num_running: int) -> list[int]:
        drafts = super().choose(sequence, most, num_running)
        if drafts:
            self.texts.by_request[sequence.request.id].is_verifying = True
        return drafts

    def observe_step(self, num_sequences: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        if not num_drafts and (self.has_too_many or self._pause.skip_step()):
            return
        cost = self.costs.observe(num_sequences, num_drafts, seconds)
        step_seconds = self.costs.find_step_seconds()
        lookup_seconds = self.texts.take_seconds()
        if step_seconds > 0.0:
            cost += lookup_seconds / step_seconds
        self._pause.observe(num_accepted / num_sequences, cost, num_drafts > 0)
        self._num_steps += 1
        if self._num_steps % self.REVIEW_STEPS == 0:
            self.texts.min_match_length = self._find_min_match_length(num_sequences)

    def _find_min_match_length(self, num_running: int) -> int:
        cost = self._find_cost(num_running)
        fixed_cost = self._find_fixed_cost(num_running, self._num_drafting)
        for length in range(1, LONGEST):
            find_acceptance = partial(self.texts.rates.find_later_rate, length)
            if count_worthwhile(find_acceptance, self.num_tokens, cost, fixed_cost, self.WASTE_WEIGHT)[0]:
                return length
        return LONGEST

    def forget(self, sequence: Sequence) -> None:
        self.texts.forget(sequence)

    def has_drafts(self, sequence: Sequence, num_running: int) -> bool:
        return bool(self._find_drafts(sequence, self.num_tokens, num_running))

    def _may_draft(self, sequence: Sequence) -> bool:
        return not self._pause.is_on and super()._may_draft(sequence)


class ModelSpeculator(Speculator):
    """Drafts with another model if that pays off: a draft id costs a step of that model in addition to the row.

    Where a draft from the texts is expected to save at least as much time, it is verified instead, and the model is
    not asked. Such a draft must also be worthwhile for a `TextSpeculator`. The model goes first until its rate is
    known, and again after some ids without it, because it may have become better.
    """

    RATE_MEMORY = 0.98  # weight of the rate so far, over all sequences, relative to one new comparison
    TRIAL_IDS = 32  # make a draft after this many ids without one, so that a low rate can recover
    FEW = 8  # drafts of a sequence after which its rate is known

    def __init__(
        self,
        num_tokens: int,
        proposer: BatchDraftProposer,
        max_sequences: int | None = None,
        texts: TextDrafters | None = None,
    ) -> None:
        """texts: None to verify no drafts from texts."""
        super().__init__(num_tokens, max_sequences)
        self.texts = texts
        self._drafters: dict[int, ModelDrafter] = {}
        self._proposer = proposer
        self._mean_rate = FIRST_RATE  # mean over all sequences, used as the initial rate of a new one
        self._num_steps = 0

    def update(self, sequence: Sequence) -> None:
        if not sequence.num_output:
            return
        drafter = self._drafters.get(sequence.request.id)
        if drafter is None:
            drafter = self._drafters[sequence.request.id] = ModelDrafter(rate=self._mean_rate)
        if drafter.proposed:
            drafter.check_last(sequence.token_ids)
            self._mean_rate = self.RATE_MEMORY * self._mean_rate + (1.0 - self.RATE_MEMORY) * drafter.rate
            drafter.proposed = ()
            drafter.num_ids = len(sequence.token_ids)
        if self.texts is not None and not self.has_too_many:
            self.texts.update(sequence)

    def prepare(self, ready: Iterable[tuple[Sequence, int]], num_running: int, num_waiting: int = 0) -> None:
        super().prepare(ready, num_running, num_waiting)
        drafters = []
        wanted = []
        for sequence, most in ready:
            drafter = self._drafters.get(sequence.request.id)
            if drafter is None or drafter.has_draft(sequence) or not self._may_draft(sequence):
                continue
            most = min(most, self.num_tokens)
            count, saved = self._count_guesses(drafter, sequence, most, num_running)
            if not count:
                continue
            if drafter.num_judged >= self.FEW and not self._is_trial_due(drafter, sequence):
                looked_up, saved_by_text = self._look_up(sequence, most, num_running)
                if looked_up and saved_by_text >= saved:
                    continue
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
        count, _ = self._count_guesses(drafter, sequence, self.num_tokens, num_running)
        return count > 0 or bool(self._look_up(sequence, self.num_tokens, num_running)[0])

    def choose(self, sequence: Sequence, most: int, num_running: int) -> list[int]:
        """Choose the model's drafts if there are any, because `prepare` asked the model only where they are better."""
        drafter = self._drafters.get(sequence.request.id)
        if self.texts is None or drafter is None or drafter.has_draft(sequence) or not self._may_draft(sequence):
            return super().choose(sequence, most, num_running)
        drafts, _ = self._look_up(sequence, most, num_running)
        if drafts:
            self.texts.by_request[sequence.request.id].is_verifying = True
            self._num_drafting += 1
        return drafts

    def are_looked_up(self, sequence: Sequence) -> bool:
        drafter = None if self.texts is None else self.texts.by_request.get(sequence.request.id)
        return drafter is not None and drafter.is_verifying

    def observe_step(self, num_sequences: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        super().observe_step(num_sequences, num_drafts, num_accepted, seconds)
        self._num_steps += 1
        if self.texts is not None and self._num_steps % self.REVIEW_STEPS == 0:
            self.texts.min_match_length = self._find_min_match_length(self.texts, num_sequences)

    def _find_min_match_length(self, texts: TextDrafters, num_running: int) -> int:
        """Return the length of matches whose drafts save as much as the model's."""
        _, saved = self._count_worthwhile(lambda index: self._mean_rate, self.num_tokens, num_running)
        for length in range(1, LONGEST):
            find_acceptance = partial(texts.rates.find_later_rate, length)
            count, saved_by_text = self._count_worthwhile(
                find_acceptance, self.num_tokens, num_running, is_of_text=True
            )
            if count and saved_by_text >= saved:
                return length
        return LONGEST

    def _count_guesses(
        self, drafter: ModelDrafter, sequence: Sequence, most: int, num_running: int
    ) -> tuple[int, float]:
        """Return how many drafts of the model are worthwhile, and how many ids' time they are expected to save."""
        count, saved = self._count_worthwhile(drafter.find_acceptance, most, num_running)
        return count or min(most, int(self._is_trial_due(drafter, sequence))), saved

    def _is_trial_due(self, drafter: ModelDrafter, sequence: Sequence) -> bool:
        return len(sequence.token_ids) - drafter.num_ids >= self.TRIAL_IDS

    def _look_up(self, sequence: Sequence, most: int, num_running: int) -> tuple[list[int], float]:
        """Return the worthwhile drafts from texts, and how many ids' time they are expected to save."""
        drafter = None if self.texts is None else self.texts.by_request.get(sequence.request.id)
        if drafter is None or not drafter.has_draft(sequence):
            return [], 0.0
        most = min(most, len(drafter.proposed))
        count, saved = self._count_worthwhile(drafter.find_acceptance, most, num_running, is_of_text=True)
        return list(drafter.proposed[:count]), saved

    def _count_worthwhile(
        self, find_acceptance: Callable[[int], float], most: int, num_running: int, is_of_text: bool = False
    ) -> tuple[int, float]:
        """See `count_worthwhile`. is_of_text: the drafts come from a text, and take no step of the model."""
        fixed_cost = self._find_fixed_cost(num_running, self._num_drafting_before)
        cost = super()._find_cost(num_running) if is_of_text else self._find_cost(num_running)
        waste_weight = TextSpeculator.WASTE_WEIGHT if is_of_text else self.WASTE_WEIGHT
        return count_worthwhile(find_acceptance, most, cost, fixed_cost, waste_weight)

    def forget(self, sequence: Sequence) -> None:
        self._drafters.pop(sequence.request.id, None)
        self._proposer.forget(sequence.request.id)
        if self.texts is not None:
            self.texts.forget(sequence)

    def _find_cost(self, num_running: int) -> float:
        """Add the cost of a step of the proposer."""
        step_seconds = self.costs.find_step_seconds()
        share = self._proposer.step_seconds / step_seconds if step_seconds > 0.0 else 0.0
        return super()._find_cost(num_running) + share
