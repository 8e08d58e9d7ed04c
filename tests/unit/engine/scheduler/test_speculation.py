"""Drafts under random loads: the same requests end in the same way, whatever is guessed when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.common.types import LOWEST_PRIORITY, EngineCoreRequest, FinishReason, Sampling
from serve_llm.engine.scheduler.output import RunnerOutput
from serve_llm.engine.scheduler.prompt_lookup import NgramDraft
from serve_llm.engine.scheduler.scheduler import Scheduler
from serve_llm.engine.scheduler.speculation import TextSpeculator
from serve_llm.engine.scheduler.step_costs import StepCosts
from support.scheduling import FULL, Arrival, FakeWorkers, Load, loads, token_after
from support.speculation import FreeDrafts


class Guesser:
    """Knows the continuation, and is sometimes wrong."""

    def __init__(self, period: int, match_length: int | None = None) -> None:
        """period: one in so many guesses is wrong. match_length: None means the number of ids since the last wrong
        guess, at least 3."""
        self.period = period
        self.match_length = match_length

    def propose(self, token_ids: Sequence[int], count: int) -> NgramDraft:
        ids = list(token_ids)
        for _ in range(count):
            ids.append(51 if len(ids) % self.period == 0 else token_after(ids))
        match_length = max(3, len(token_ids) % self.period) if self.match_length is None else self.match_length
        return NgramDraft(ids[len(token_ids) :], match_length)

    def finish(self, sequence: object) -> None:
        """Do nothing: there is no state."""


requests = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 25),
    st.sampled_from([None, 1]),
    st.integers(0, 12),
    st.booleans(),
)


@settings(max_examples=150)
@given(
    st.lists(requests, min_size=1, max_size=12),
    loads,
    st.integers(1, 6),  # drafts per sequence
    st.integers(1, 9),  # period of wrong guesses
)
def test_random_loads(specs, load: Load, num_tokens, period) -> None:
    arrivals = []
    for number, (prompt, max_tokens, logprobs, step, abort) in enumerate(specs):
        sampling = Sampling(max_tokens=max_tokens, seed=0, stop_token_ids=(7,), logprobs=logprobs)
        arrivals.append(Arrival(EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling), step, abort))
    load.run(
        load.build_scheduler(speculator=TextSpeculator(num_tokens, lambda request: Guesser(period), time.monotonic)),
        arrivals,
    )


def make_scheduler(
    num_tokens: int, period: int, num_blocks: int = 100, match_length: int | None = None
) -> tuple[Scheduler, TextSpeculator]:
    speculator = TextSpeculator(num_tokens, lambda request: Guesser(period, match_length), time.monotonic)
    return build_scheduler(speculator, num_blocks), speculator


def build_scheduler(speculator: TextSpeculator, num_blocks: int = 100, max_model_len: int = 64) -> Scheduler:
    return Scheduler(
        FULL,
        num_blocks,
        max_num_seqs=4,
        max_model_len=max_model_len,
        max_chunk=64,
        prefix_caching=True,
        speculator=speculator,
    )


def run(scheduler: Scheduler, workers: FakeWorkers) -> tuple[int, list[int]]:
    batch = scheduler.schedule(64, 0.0)
    outputs = scheduler.update_from_output(batch, workers.execute(batch))
    scheduler.check_integrity()
    return len(batch.scheduled[0].draft_ids), [token_id for output in outputs for token_id in output.token_ids]


def add(scheduler: Scheduler, number: int, priority: int = 0) -> None:
    sampling = Sampling(max_tokens=50, seed=0)
    scheduler.add(EngineCoreRequest(id=number, prompt_ids=[1, 2], sampling=sampling, priority=priority), 0.0)


def count_drafts(scheduler: Scheduler, workers: FakeWorkers, num_steps: int) -> list[int]:
    return [run(scheduler, workers)[0] for _ in range(num_steps) if scheduler.has_work]


def test_drafts_grow_while_they_come_true() -> None:
    for period, first, longest in ((1000, 1, 6), (2, 1, 1)):
        scheduler, _ = make_scheduler(6, period)
        add(scheduler, 1)
        numbers = count_drafts(scheduler, FakeWorkers(FULL), 100)
        assert numbers[:2] == [0, first]
        assert max(numbers) == longest


def test_longer_matches_have_longer_drafts() -> None:
    """Even before anything is learned."""
    first = []
    for length in (3, 6, 10, 16):
        scheduler, _ = make_scheduler(8, 1000, match_length=length)
        add(scheduler, 1)
        first.append(count_drafts(scheduler, FakeWorkers(FULL), 2)[1])
    assert first == sorted(first) and first[0] == 1 and first[-1] > 4


def test_rates_by_length_are_learned_from_all_sequences() -> None:
    scheduler, speculator = make_scheduler(4, 1, match_length=12)
    workers = FakeWorkers(FULL)
    add(scheduler, 1)
    count_drafts(scheduler, workers, 50)
    add(scheduler, 2)
    assert count_drafts(scheduler, workers, 9) == [0] * 9, "matches that mislead, whatever the text"
    assert speculator.texts.rates.find_rate(12) < 0.3 and speculator.texts.rates.find_rate(14) > 0.8
    (drafter,) = speculator._drafters.values()
    drafter.proposer = Guesser(1, 14)
    assert count_drafts(scheduler, workers, 2)[1] > 0, "matches of another length"


def test_a_sequence_whose_guesses_do_worse_has_fewer_drafts() -> None:
    scheduler, speculator = make_scheduler(4, 1, match_length=16)
    speculator.texts.rates.observe = lambda length, was_right: None  # the drafts of others are accepted
    add(scheduler, 1)
    numbers = count_drafts(scheduler, FakeWorkers(FULL), 16)
    given = [number for number in numbers if number]
    assert given[0] == 4 and numbers[-1] == 0 and given == sorted(given, reverse=True)


def test_after_drafts_that_fail_a_sequence_waits_ever_longer() -> None:
    """Even if its guesses look good and drafts look free."""
    speculator = TextSpeculator(2, lambda request: Guesser(1, 16), time.monotonic)
    scheduler = build_scheduler(speculator, max_model_len=400)
    speculator.costs = FreeDrafts()
    speculator.texts.rates.observe = lambda length, was_right: None
    scheduler.add(EngineCoreRequest(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=300, seed=0)), 0.0)
    workers = FakeWorkers(FULL)
    steps = [number for number, drafts in enumerate(count_drafts(scheduler, workers, 280)) if drafts]
    waits = [after - before for before, after in pairwise(steps)]
    assert waits == [3, 5, 9, 17, 33, 65, 65, 65]


def test_drafts_that_come_true_halve_the_wait_however_many_failed_before() -> None:
    speculator = TextSpeculator(2, lambda request: Guesser(1, 16), time.monotonic)
    scheduler = build_scheduler(speculator, num_blocks=2000, max_model_len=3000)
    speculator.costs = FreeDrafts()
    speculator.texts.rates.observe = lambda length, was_right: None
    scheduler.add(EngineCoreRequest(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=2900, seed=0)), 0.0)
    workers = FakeWorkers(FULL, long_rope_threshold=4000)
    count_drafts(scheduler, workers, 1000)
    (drafter,) = speculator._drafters.values()
    drafter.proposer = Guesser(100_000, 16)
    for _ in range(2):
        while not run(scheduler, workers)[0]:
            pass
    drafter.proposer = Guesser(1, 16)
    numbers = count_drafts(scheduler, workers, 200)
    steps = [number for number, drafts in enumerate(numbers) if drafts]
    waits = [after - before for before, after in pairwise(steps)]
    assert waits[-2:] == [65, 65] and {33} < set(waits), waits


def test_drafts_that_come_true_end_the_waiting() -> None:
    scheduler, speculator = make_scheduler(2, 1, match_length=16)
    speculator.costs = FreeDrafts()
    workers = FakeWorkers(FULL)
    add(scheduler, 1)
    count_drafts(scheduler, workers, 8)
    (drafter,) = speculator._drafters.values()
    assert drafter.num_failures > 1
    drafter.proposer = Guesser(1000, 16)
    count_drafts(scheduler, workers, 16)
    assert drafter.num_failures == 0


def test_no_lookups_and_no_drafts_beyond_a_number_of_sequences() -> None:
    speculator = TextSpeculator(4, lambda request: Guesser(1000, 16), time.monotonic, max_sequences=1)
    scheduler = build_scheduler(speculator)
    speculator.costs = FreeDrafts()
    workers = FakeWorkers(FULL)
    for number in (1, 2):
        add(scheduler, number)
    for _ in range(6):
        scheduler.prepare_drafts(())
        assert run(scheduler, workers)[0] == 0
    assert not speculator._drafters and not speculator.has_drafts(scheduler._sequences[1], 2)
    scheduler.abort(2)
    numbers = []
    for _ in range(3):
        scheduler.prepare_drafts(())
        numbers.append(run(scheduler, workers)[0])
    assert numbers[0] == 0 and numbers[1] > 0


@pytest.mark.parametrize(("priority", "has_drafts"), [(LOWEST_PRIORITY, True), (0, False)])
def test_waiting_batches_leave_others_their_drafts(priority: int, has_drafts: bool) -> None:
    """Sequences of batches pause while others run, so they count only if they run alone."""
    speculator = TextSpeculator(4, lambda request: Guesser(1000, 16), time.monotonic, max_sequences=2)
    scheduler = build_scheduler(speculator)
    speculator.costs = FreeDrafts()
    workers = FakeWorkers(FULL)
    add(scheduler, 1)
    for number in range(2, 12):
        add(scheduler, number, priority)
    num_drafts = 0
    for _ in range(6):
        scheduler.prepare_drafts(())
        num_drafts += run(scheduler, workers)[0]
    assert (num_drafts > 0) == has_drafts
    scheduler.abort(1)
    scheduler.prepare_drafts(())
    assert speculator.has_too_many


def test_wrong_guesses_are_not_verified_for_ever_but_judged_still() -> None:
    scheduler, speculator = make_scheduler(4, 1)
    workers = FakeWorkers(FULL)
    add(scheduler, 1)
    assert count_drafts(scheduler, workers, 20)[-1] == 0
    (drafter,) = speculator._drafters.values()
    drafter.proposer = Guesser(1000)  # the text repeats itself from here on
    assert max(count_drafts(scheduler, workers, 25)) > 0


def observe_steps(plain: float, fixed: float, each: float) -> StepCosts:
    """Return the costs after steps of 8 sequences that take this many seconds; drafts add `fixed`, and `each` per
    draft."""
    costs = StepCosts()
    for num_drafts in (0, 1, 0, 4, 0, 9) * 9:
        costs.observe(8, num_drafts, plain + fixed * (num_drafts > 0) + each * num_drafts)
    return costs


def test_drafts_must_save_several_times_what_they_may_waste() -> None:
    scheduler, speculator = make_scheduler(4, 1000, match_length=16)
    add(scheduler, 1)
    count_drafts(scheduler, FakeWorkers(FULL), 2)
    (sequence,) = scheduler._sequences.values()
    numbers = []
    for draft_seconds in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.02):  # a step of 8 sequences takes 10 ms
        speculator.costs = observe_steps(0.010, 0.0, draft_seconds)
        numbers.append(len(speculator.choose(sequence, 4, 8)))
    assert numbers == sorted(numbers, reverse=True) and numbers[0] == 4 and numbers[-1] == 0, numbers


def test_the_first_sequence_that_drafts_pays_what_a_step_with_drafts_costs() -> None:
    scheduler, speculator = make_scheduler(4, 1000, match_length=6)
    for number in (1, 2):
        add(scheduler, number)
    count_drafts(scheduler, FakeWorkers(FULL), 2)
    first, second = scheduler._sequences.values()
    speculator.prepare([], 8)
    assert speculator.choose(first, 4, 8), "costs are not known yet"
    speculator.costs = observe_steps(0.010, 0.003, 0.0)
    for _ in range(2):
        speculator.prepare([], 8)
    assert not speculator.choose(first, 4, 8) and not speculator.has_drafts(first, 8), "too much for one"
    speculator._num_drafting = 1
    assert speculator.choose(second, 4, 8), "another has drafts already"
    speculator.prepare([], 8)
    assert speculator.choose(first, 4, 8), "two in the step before, which share it"


def test_short_matches_are_not_looked_for_while_they_are_worth_nothing() -> None:
    scheduler, speculator = make_scheduler(4, 1000, match_length=3)
    workers = FakeWorkers(FULL)
    add(scheduler, 1)
    count_drafts(scheduler, workers, 2)
    (drafter,) = speculator._drafters.values()
    lengths: list[int] = []

    class Watched(Guesser):
        def propose(self, token_ids: Sequence[int], count: int) -> NgramDraft:
            lengths.append(len(token_ids))
            return super().propose(token_ids, count)

    drafter.proposer = Watched(1, match_length=3)
    drafter.is_verifying = False
    speculator.texts.min_match_length = 7
    speculator.texts.rates.find_rate = lambda length: 0.0  # nothing is verified
    count_drafts(scheduler, workers, 13)
    assert len(lengths) > 2 and {after - before for before, after in pairwise(lengths)} == {4}


def test_no_lookups_and_no_drafts_in_a_pause() -> None:
    scheduler, speculator = make_scheduler(4, 1000, match_length=10)
    workers = FakeWorkers(FULL)
    add(scheduler, 1)
    assert count_drafts(scheduler, workers, 3)[-1] > 0
    for number in range(200):  # a step with drafts takes three times as long, and no draft is accepted
        speculator.observe_step(1, 4 * (number % 2), 0, 0.030 if number % 2 else 0.010)
    assert speculator._pause.is_on
    add(scheduler, 2)
    (drafter,) = speculator._drafters.values()
    before = drafter.num_ids
    assert count_drafts(scheduler, workers, 5) == [0] * 5 and drafter.num_ids == before
    assert len(speculator._drafters) == 2, "the text of the second is kept for later ones"
    while speculator._pause.is_on:
        speculator.observe_step(1, 0, 0, 0.010)
    assert max(count_drafts(scheduler, workers, 5)) > 0


def test_counters_and_the_end_of_a_request() -> None:
    scheduler, speculator = make_scheduler(4, 1000)
    scheduler.add(EngineCoreRequest(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=30, seed=0)), 0.0)
    workers = FakeWorkers(FULL)
    num_steps = 0
    num_ids = 0
    while scheduler.has_work:
        num_ids += len(run(scheduler, workers)[1])
        num_steps += 1
    stats = scheduler.stats()
    assert num_ids == 30 and stats.num_accepted_tokens == stats.num_draft_tokens == 30 - num_steps
    assert 0 < stats.num_drafts < num_steps
    by_position = stats.accepted_by_position
    assert sum(by_position) == stats.num_accepted_tokens and by_position == sorted(by_position, reverse=True)
    assert by_position[0] == stats.num_drafts and len(by_position) > 1
    assert not speculator._drafters, "a drafter outlives its request"


def test_no_draft_takes_the_blocks_that_others_need() -> None:
    """A draft preempts no request: without a free block, there is no draft."""
    scheduler, _ = make_scheduler(6, 1000, num_blocks=2, match_length=10)
    scheduler.add(EngineCoreRequest(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=6, seed=0)), 0.0)
    workers = FakeWorkers(FULL)
    assert run(scheduler, workers)[0] == 0
    drafts = scheduler.schedule(64, 0.0).scheduled[0].draft_ids
    assert len(drafts) == 2
    other, _ = make_scheduler(6, 1000, num_blocks=1)
    other.add(EngineCoreRequest(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=2, seed=0)), 0.0)
    assert run(other, FakeWorkers(FULL))[0] == 0


def test_an_error_is_the_requests_end() -> None:
    scheduler, _ = make_scheduler(4, 1000)
    scheduler.add(EngineCoreRequest(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=30, seed=0)), 0.0)
    run(scheduler, FakeWorkers(FULL))
    batch = scheduler.schedule(64, 0.0)
    assert batch.scheduled[0].draft_ids
    (output,) = scheduler.update_from_output(batch, [RunnerOutput(error="the logits are not finite")])
    assert output.finish_reason is FinishReason.ERROR and not scheduler.has_work
    scheduler.check_integrity()
