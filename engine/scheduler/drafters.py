"""The drafts of each sequence: the last one, how often such drafts are right, and when a text is looked up again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from serve_llm.common.types import EngineCoreRequest
from serve_llm.engine.scheduler.acceptance_rates import AcceptanceRates
from serve_llm.engine.scheduler.prompt_lookup import NgramDraft
from serve_llm.engine.scheduler.sequence import Sequence

FIRST_RATE = 0.5  # initial acceptance rate
RATE_WEIGHT = 0.15  # weight of the latest draft
EXCESS_WEIGHT = 0.1  # the same for drafts from texts


class DraftProposer(Protocol):
    """Drafts the continuation of one text, at almost no cost."""

    def propose(self, token_ids: Items[int], count: int) -> NgramDraft:
        """Up to `count` ids that may come next. token_ids: prompt and output so far; they only ever grow."""

    def finish(self, sequence: Sequence) -> None:
        """Record that the text has ended."""


@dataclass(slots=True)
class Drafter(ABC):
    """The drafts of one sequence."""

    proposed: Items[int] = ()  # draft of the ids after the first `num_ids`
    num_ids: int = 0  # length of the sequence when `proposed` was made

    def has_draft(self, sequence: Sequence) -> bool:
        """Whether the last draft is of the sequence's next ids."""
        return bool(self.proposed) and self.num_ids == len(sequence.token_ids)

    def check_last(self, token_ids: Items[int]) -> None:
        """Learn from the last draft by comparing it with the actual ids, whether or not it was verified."""
        for index, (guess, actual) in enumerate(zip(self.proposed, token_ids[self.num_ids :], strict=False)):
            self.learn(index, guess == actual)
            if guess != actual:
                break

    @abstractmethod
    def learn(self, index: int, was_right: bool) -> None:
        """Record whether the id at `index` of the draft was right, given that those before it were."""

    @abstractmethod
    def find_acceptance(self, index: int) -> float:
        """Return the probability that the id at `index` of the draft is right, given that those before it are."""


@dataclass(slots=True)
class ModelDrafter(Drafter):
    rate: float = FIRST_RATE  # recent acceptance rate of its drafts
    num_judged: int = 0  # drafts that `rate` has been learned from

    def learn(self, index: int, was_right: bool) -> None:
        self.num_judged += 1
        self.rate += RATE_WEIGHT * (was_right - self.rate)

    def find_acceptance(self, index: int) -> float:
        return self.rate


@dataclass(slots=True, kw_only=True)
class TextDrafter(Drafter):
    proposer: DraftProposer
    rates: AcceptanceRates  # shared by all sequences
    match_length: int = 0  # ids that the draft follows
    next_lookup: int = 0  # length of the sequence at which to look for the next draft
    excess: float = 0.0  # recent acceptance rate of its drafts, minus that in `rates`
    is_verifying: bool = False  # whether `proposed` is verified by a step
    num_failures: int = 0  # log2 of the next wait: drafts without an accepted id, minus those with one, in limits

    def learn(self, index: int, was_right: bool) -> None:
        length = self.match_length + index
        self.excess += EXCESS_WEIGHT * (was_right - self.rates.find_rate(length) - self.excess)
        self.rates.observe(length, was_right)

    def find_acceptance(self, index: int) -> float:
        return max(0.0, self.rates.find_rate(self.match_length + index) + min(0.0, self.excess))


class TextDrafters:
    """Looks all texts up. A match grows by one with each id, so after a short one there is no lookup until it may be
    long enough. After drafts of which nothing was accepted, a sequence has none for a number of ids that doubles, so
    that misleading text costs little even if the costs are wrong."""

    MAX_SKIPPED = 8  # ids without a lookup
    MAX_FAILURES = 6  # beyond which the wait does not grow, so that each right draft still halves it

    def __init__(
        self,
        num_tokens: int,
        build_proposer: Callable[[EngineCoreRequest], DraftProposer],
        clock: Callable[[], float],
    ) -> None:
        """See `TextSpeculator`."""
        self.by_request: dict[int, TextDrafter] = {}
        self.build_proposer = build_proposer
        self.rates = AcceptanceRates()
        self.min_match_length = 1  # the length of matches that are worth drafts
        self._num_tokens = num_tokens
        self._clock = clock
        self._seconds = 0.0

    def update(self, sequence: Sequence, is_paused: bool = False) -> None:
        """Process the sequence's new ids. is_paused: look nothing up for now."""
        drafter = self.by_request.get(sequence.request.id)
        if drafter is None:  # also in a pause, because its proposer keeps the text for later ones
            drafter = TextDrafter(proposer=self.build_proposer(sequence.request), rates=self.rates)
            self.by_request[sequence.request.id] = drafter
        if drafter.is_verifying and len(sequence.token_ids) > drafter.num_ids:
            self._settle(drafter, sequence.token_ids)
        if not is_paused and len(sequence.token_ids) >= drafter.next_lookup:
            started_at = self._clock()
            self._look_up(drafter, sequence.token_ids)
            self._seconds += self._clock() - started_at

    def take_seconds(self) -> float:
        """Return the time of the lookups since the last call."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def forget(self, sequence: Sequence) -> None:
        """Record that the request has ended."""
        drafter = self.by_request.pop(sequence.request.id, None)
        if drafter is not None:
            drafter.proposer.finish(sequence)

    def _settle(self, drafter: TextDrafter, token_ids: Items[int]) -> None:
        """Wait before the next lookup if nothing was accepted."""
        drafter.is_verifying = False
        if drafter.proposed[0] == token_ids[drafter.num_ids]:
            drafter.num_failures = max(0, drafter.num_failures - 1)
            return
        drafter.num_failures = min(self.MAX_FAILURES, drafter.num_failures + 1)
        drafter.next_lookup = len(token_ids) + 2**drafter.num_failures

    def _look_up(self, drafter: TextDrafter, token_ids: Items[int]) -> None:
        if drafter.proposed:
            drafter.check_last(token_ids)
        drafter.proposed, drafter.match_length = drafter.proposer.propose(token_ids, self._num_tokens)
        drafter.num_ids = len(token_ids)
        num_missing = self.min_match_length - drafter.match_length
        drafter.next_lookup = drafter.num_ids + max(1, min(self.MAX_SKIPPED, num_missing))
