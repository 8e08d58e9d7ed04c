"""Prompt lookup beside a draft model: each step verifies the draft that is expected to save more."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items

import pytest

from serve_llm.common.types import EngineCoreRequest, Sampling, SchedulerStats
from serve_llm.engine.scheduler.drafters import TextDrafters
from serve_llm.engine.scheduler.prompt_lookup import NO_DRAFT, NgramDraft
from serve_llm.engine.scheduler.scheduler import Scheduler
from serve_llm.engine.scheduler.sequence import Sequence
from serve_llm.engine.scheduler.speculation import ModelSpeculator
from serve_llm.engine.scheduler.step_costs import StepCosts
from support.scheduling import FULL, FakeWorkers, token_after
from support.speculation import FreeDrafts

WRONG = 51


def continue_text(token_ids: Items[int], count: int, wrong_every: int) -> list[int]:
    ids = list(token_ids)
    for _ in range(count):
        ids.append(WRONG if len(ids) % wrong_every == 0 else token_after(ids))
    return ids[len(token_ids) :]


class Model:
    """A draft model that knows the continuation, and is sometimes wrong."""

    step_seconds = 0.0

    def __init__(self, wrong_every: int) -> None:
        self.wrong_every = wrong_every
        self.asked: list[int] = []  # the length of the text, each time

    def propose(self, wanted: Items[tuple[Sequence, int]]) -> list[list[int]]:
        self.asked += [len(sequence.token_ids) for sequence, _ in wanted]
        return [continue_text(sequence.token_ids, count, self.wrong_every) for sequence, count in wanted]

    def forget(self, request_id: int) -> None:
        """Do nothing: there is no state."""


class Texts:
    """Finds the continuation in texts, from some length on, and is sometimes wrong."""

    def __init__(self, wrong_every: int, match_length: int, first: int = 0, end: int = 1 << 20) -> None:
        self.wrong_every = wrong_every
        self.match_length = match_length
        self.lengths = range(first, end)

    def propose(self, token_ids: Items[int], count: int) -> NgramDraft:
        if len(token_ids) not in self.lengths:
            return NO_DRAFT
        return NgramDraft(continue_text(token_ids, count, self.wrong_every), self.match_length)

    def finish(self, sequence: object) -> None:
        """Do nothing: there is no state."""


def run(model: Model, texts: Texts | None, costs: StepCosts | None = None, num_ids: int = 120) -> SchedulerStats:
    """Compute a text of so many ids. Returns the counters."""
    lookups = None if texts is None else TextDrafters(4, lambda request: texts, time.monotonic)
    speculator = ModelSpeculator(4, model, texts=lookups)
    speculator.costs = costs or FreeDrafts()
    scheduler = Scheduler(
        FULL, 100, max_num_seqs=4, max_model_len=400, max_chunk=64, prefix_caching=True, speculator=speculator
    )
    scheduler.add(EngineCoreRequest(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=num_ids, seed=0)), 0.0)
    workers = FakeWorkers(FULL)
    found: list[int] = []
    while scheduler.has_work:
        scheduler.prepare_drafts(())
        step = scheduler.schedule(64, 0.0)
        results = workers.execute(step)
        num_accepted = sum(len(result.accepted_ids) for result in results)
        speculator.observe_step(1, len(step.scheduled[0].draft_ids), num_accepted, 0.010)
        for output in scheduler.update_from_output(step, results):
            found += output.token_ids
        scheduler.stats().num_steps += 1
        scheduler.check_integrity()
    expected = continue_text([1, 2], num_ids, 1 << 20)
    assert found == expected[: len(found)] and (len(found) == num_ids or found[-1] == expected[len(found) - 1])
    assert not speculator._drafters and (lookups is None or not lookups.by_request)
    return scheduler.stats()


def test_a_long_match_proposes_and_the_model_is_not_asked() -> None:
    model = Model(wrong_every=3)
    stats = run(model, Texts(1000, match_length=16, first=40, end=68))
    assert stats.num_lookup_accepted_tokens == stats.num_lookup_draft_tokens > 20
    assert stats.num_lookup_draft_tokens < stats.num_draft_tokens
    assert not [length for length in model.asked if 44 <= length < 68], "where the text repeats itself"
    assert [length for length in model.asked if length < 40] and [length for length in model.asked if length > 68]


def test_the_model_drafts_where_texts_mislead() -> None:
    """A step with drafts that mislead is one that the model cannot use."""
    alone = run(Model(1000), None)
    stats = run(Model(1000), Texts(1, match_length=16))
    assert stats.num_lookup_accepted_tokens == 0 and stats.num_lookup_drafts <= 3
    assert stats.num_steps <= alone.num_steps + stats.num_lookup_drafts


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("right_texts", [2, 4, 1000])
def test_both_take_no_more_steps_than_the_model_alone(wrong_every: int, right_texts: int) -> None:
    alone = run(Model(wrong_every), None)
    both = run(Model(wrong_every), Texts(right_texts, match_length=8))
    assert both.num_steps <= alone.num_steps


def test_a_match_is_preferred_to_a_costly_model() -> None:
    """If the model's own step takes a third of the served model's, a match that is right as often saves more."""
    costs = StepCosts()
    for num_drafts in (0, 1, 0, 4) * 9:
        costs.observe(1, num_drafts, 0.010)
    model = Model(4)
    model.step_seconds = 0.003
    stats = run(model, Texts(4, match_length=10), costs)
    assert stats.num_lookup_drafts > 2 * (stats.num_drafts - stats.num_lookup_drafts)
