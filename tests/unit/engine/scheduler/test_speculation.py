"""Drafts under random loads: as many requests end alike, whatever is guessed when."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.common.types import FinishReason, Request, Sampling
from serve_llm.engine.scheduler.output import RunnerOutput
from serve_llm.engine.scheduler.scheduler import Scheduler
from serve_llm.engine.scheduler.speculation import RowCost, TextSpeculator
from support.scheduling import FULL, Arrival, FakeWorkers, Load, loads, token_after


class Guesser:
    """Knows what comes, and is wrong now and then."""

    def __init__(self, period: int) -> None:
        self.period = period  # one guess of so many is wrong

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        ids = list(token_ids)
        for _ in range(count):
            ids.append(51 if len(ids) % self.period == 0 else token_after(ids))
        return ids[len(token_ids) :]

    def finish(self, sequence: object) -> None:
        """Nothing is kept."""


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
    st.integers(1, 6),  # drafts of a sequence
    st.integers(1, 9),  # how often a guess is wrong
)
def test_random_loads(specs, load: Load, num_tokens, period) -> None:
    arrivals = []
    for number, (prompt, max_tokens, logprobs, step, abort) in enumerate(specs):
        sampling = Sampling(max_tokens=max_tokens, seed=0, stop_token_ids=(7,), logprobs=logprobs)
        arrivals.append(Arrival(Request(id=number, prompt_ids=prompt, sampling=sampling), step, abort))
    load.run(load.build_scheduler(speculator=TextSpeculator(num_tokens, lambda request: Guesser(period))), arrivals)


def make_scheduler(num_tokens: int, period: int, num_blocks: int = 100) -> tuple[Scheduler, TextSpeculator]:
    speculator = TextSpeculator(num_tokens, lambda request: Guesser(period))
    scheduler = Scheduler(
        FULL,
        num_blocks,
        max_num_seqs=4,
        max_model_len=64,
        max_chunk=64,
        prefix_caching=True,
        speculator=speculator,
    )
    return scheduler, speculator


def run(scheduler: Scheduler, workers: FakeWorkers) -> tuple[int, list[int]]:
    batch = scheduler.schedule(64, 0.0)
    outputs = scheduler.update_from_output(batch, workers.execute(batch))
    scheduler.check_integrity()
    return len(batch.scheduled[0].draft_ids), [token_id for output in outputs for token_id in output.token_ids]


def test_drafts_grow_while_they_come_true() -> None:
    for period, first, longest in ((1000, 2, 6), (2, 2, 3)):
        scheduler, _ = make_scheduler(6, period)
        scheduler.add(Request(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=50, seed=0)), 0.0)
        workers = FakeWorkers(FULL)
        numbers = []
        while scheduler.has_work:
            numbers.append(run(scheduler, workers)[0])
        assert numbers[:2] == [0, first]
        assert max(numbers) <= longest and (period == 2 or max(numbers) == longest)


def test_wrong_guesses_are_not_verified_for_ever_but_judged_still() -> None:
    scheduler, speculator = make_scheduler(4, 1)
    scheduler.add(Request(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=50, seed=0)), 0.0)
    workers = FakeWorkers(FULL)
    numbers = [run(scheduler, workers)[0] for _ in range(30)]
    assert numbers[-1] == 0
    (drafter,) = speculator._drafters.values()
    drafter.source = Guesser(1000)  # the text repeats itself from here on
    numbers = [run(scheduler, workers)[0] for _ in range(8)]
    assert max(numbers) > 0


def test_counters_and_the_end_of_a_request() -> None:
    scheduler, speculator = make_scheduler(4, 1000)
    scheduler.add(Request(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=30, seed=0)), 0.0)
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
    """A draft preempts nobody: without a free block there is none."""
    scheduler, _ = make_scheduler(6, 1000, num_blocks=2)
    scheduler.add(Request(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=6, seed=0)), 0.0)
    workers = FakeWorkers(FULL)
    assert run(scheduler, workers)[0] == 0
    drafts = scheduler.schedule(64, 0.0).scheduled[0].draft_ids
    assert len(drafts) == 2
    other, _ = make_scheduler(6, 1000, num_blocks=1)
    other.add(Request(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=2, seed=0)), 0.0)
    assert run(other, FakeWorkers(FULL))[0] == 0


def test_an_error_is_the_requests_end() -> None:
    scheduler, _ = make_scheduler(4, 1000)
    scheduler.add(Request(id=1, prompt_ids=[1, 2], sampling=Sampling(max_tokens=30, seed=0)), 0.0)
    run(scheduler, FakeWorkers(FULL))
    batch = scheduler.schedule(64, 0.0)
    assert batch.scheduled[0].draft_ids
    (output,) = scheduler.update_from_output(batch, [RunnerOutput(error="the logits are not finite")])
    assert output.finish_reason is FinishReason.ERROR and not scheduler.has_work
    scheduler.check_integrity()


def test_the_cost_of_a_row_is_measured() -> None:
    cost = RowCost()
    assert cost.share(4) == RowCost.UNKNOWN
    for rows in (1, 2, 4, 8) * 20:
        cost.observe(rows, 0.010 + 0.001 * rows)
    assert abs(cost.share(1) - 1 / 11) < 0.01 and abs(cost.share(10) - 0.5) < 0.02
    free = RowCost()
    for rows in (1, 8) * 20:
        free.observe(rows, 0.010)
    assert free.share(8) < 0.01
