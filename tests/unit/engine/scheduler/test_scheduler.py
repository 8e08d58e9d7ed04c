"""The scheduler under random loads: nothing is lost in any step, every request ends once, and ids come out right."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.common.types import LOWEST_PRIORITY, Adapter, EngineCoreOutput, EngineCoreRequest, FinishReason, Sampling
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.scheduler.scheduler import Scheduler
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from support.scheduling import FULL, MIXED, Arrival, FakeWorkers, Load, drive, expected_output, loads, token_after

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=30)
requests = st.tuples(
    prompts,
    st.integers(0, 20),
    st.sampled_from([-1, 0, 1, LOWEST_PRIORITY]),
    st.sampled_from(["", "a"]),
    st.sampled_from([1.0, 1.0, 1.2]),  # a repetition penalty needs all ids
    st.integers(0, 12),
    st.booleans(),
)


@settings(max_examples=150)
@given(st.lists(requests, min_size=1, max_size=12), loads)
def test_random_loads(specs, load: Load) -> None:
    arrivals = []
    for number, (prompt, max_tokens, priority, salt, penalty, step, abort) in enumerate(specs):
        sampling = Sampling(max_tokens=max_tokens, seed=0, stop_token_ids=(7,), repetition_penalty=penalty)
        request = EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling, priority=priority, cache_salt=salt)
        arrivals.append(Arrival(request, step, abort))
    scheduler = load.build_scheduler()
    load.run(scheduler, arrivals)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def sampling_of(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, seed=0)


def run_step(scheduler: Scheduler, workers: FakeWorkers, budget: int = 64) -> dict[int, int]:
    """Run a step. Returns the number of computed tokens by request id."""
    step = scheduler.schedule(budget, 0.0)
    ids = {one.req_index: one.request.id for one in scheduler._running}
    counts = {ids[chunk.req_index]: chunk.count for chunk in step.scheduled}
    scheduler.update_from_output(step, workers.execute(step))
    scheduler.check_integrity()
    return counts


def run_one(
    scheduler: Scheduler, request: EngineCoreRequest, workers: FakeWorkers | None = None
) -> list[EngineCoreOutput]:
    return drive(scheduler, workers or FakeWorkers(FULL), {0: [(request, False)]}, 64, 1)[request.id]


def make(num_blocks: int = 100, groups=FULL, **options) -> Scheduler:
    return Scheduler(
        groups,
        num_blocks,
        **({"max_num_seqs": 8, "max_model_len": 64, "max_chunk": 64, "prefix_caching": True} | options),
    )


def test_second_request_finds_the_first_ones_prefix_but_recomputes_its_last_token() -> None:
    scheduler, workers = make(), FakeWorkers(FULL)
    request = EngineCoreRequest(id=1, prompt_ids=list(range(8)), sampling=sampling_of(1))
    assert run_one(scheduler, request, workers)[0].cached_tokens == 0
    again = EngineCoreRequest(id=2, prompt_ids=list(range(8)), sampling=sampling_of(1))
    assert run_one(scheduler, again, workers)[0].cached_tokens == 4  # the second block's last token gives the next one
    salted = EngineCoreRequest(id=3, prompt_ids=list(range(8)), cache_salt="x", sampling=sampling_of(1))
    assert run_one(scheduler, salted, workers)[0].cached_tokens == 0
    assert scheduler.stats().prefix_cache_queries == 24
    assert scheduler.stats().prefix_cache_hits == 4


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    scheduler, workers = make(), FakeWorkers(FULL)
    for number in range(3):
        scheduler.add(EngineCoreRequest(id=number, prompt_ids=[*range(12), number], sampling=sampling_of(1)), 0.0)
    first = scheduler.schedule(64, 0.0)
    assert [(chunk.start, chunk.count) for chunk in first.scheduled] == [(0, 13)]
    scheduler.update_from_output(first, workers.execute(first))
    assert (scheduler.stats().num_waiting, scheduler.stats().num_deferred) == (2, 2)
    second = scheduler.schedule(64, 1.0)
    assert [(chunk.start, chunk.count) for chunk in second.scheduled] == [(12, 1), (12, 1)]
    assert scheduler.stats().num_deferred == 0


def test_who_waits_for_room_is_not_deferred() -> None:
    scheduler = make(max_num_seqs=1)
    for number in range(3):
        scheduler.add(EngineCoreRequest(id=number, prompt_ids=[number], sampling=sampling_of(1)), 0.0)
    scheduler.schedule(64, 0.0)
    assert (scheduler.stats().num_waiting, scheduler.stats().num_deferred) == (2, 0)


def test_a_request_that_was_cut_goes_on_from_its_ids() -> None:
    whole = run_one(make(), EngineCoreRequest(id=1, prompt_ids=[1, 2, 3], sampling=sampling_of(9)))
    ids = [i for output in whole for i in output.token_ids]
    for cut in range(len(ids)):
        request = EngineCoreRequest(id=1, prompt_ids=[1, 2, 3], output_ids=ids[:cut], sampling=sampling_of(9))
        rest = [i for output in run_one(make(), request) for i in output.token_ids]
        assert ids[:cut] + rest == ids


def test_a_request_with_nothing_left_ends_at_once() -> None:
    request = EngineCoreRequest(id=1, prompt_ids=[1], output_ids=[5, 7], sampling=sampling_of(2))
    output = make().add(request, 0.0)
    assert output is not None and output.finish_reason is FinishReason.LENGTH


def test_max_tokens_zero_computes_the_prompt_only() -> None:
    outputs = run_one(make(), EngineCoreRequest(id=1, prompt_ids=[1, 2, 3], sampling=sampling_of(0)))
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [([], FinishReason.LENGTH)]


def test_full_pool_preempts_the_last_and_both_finish() -> None:
    scheduler = make(num_blocks=10, max_model_len=40)
    sampling = sampling_of(25)
    arrivals = {0: [(EngineCoreRequest(id=n, prompt_ids=[n] * 5, sampling=sampling), False) for n in range(2)]}
    got = drive(scheduler, FakeWorkers(FULL), arrivals, 64, 1)
    assert scheduler.stats().num_preemptions > 0
    assert sum(o.num_preemptions for outputs in got.values() for o in outputs) == scheduler.stats().num_preemptions
    for number in range(2):
        request = EngineCoreRequest(id=number, prompt_ids=[number] * 5, sampling=sampling)
        assert [i for o in got[number] for i in o.token_ids] == expected_output(request)[0]


def test_window_gives_blocks_back() -> None:
    scheduler = make(num_blocks=8, groups=(KVCacheSpec(4, 6),), max_model_len=1000, max_chunk=8)
    request = EngineCoreRequest(id=1, prompt_ids=[1] * 30, sampling=sampling_of(200))
    outputs = drive(scheduler, FakeWorkers((KVCacheSpec(4, 6),)), {0: [(request, False)]}, 8, 1)[1]
    assert len(outputs) == 200  # 230 tokens through room for 32


def test_priority_goes_first() -> None:
    scheduler = make(max_num_seqs=1)
    for number, priority in ((1, 5), (2, 0), (3, 0)):
        scheduler.add(
            EngineCoreRequest(id=number, prompt_ids=[number], priority=priority, sampling=sampling_of(1)), 0.0
        )
    order, workers = [], FakeWorkers(FULL)
    while scheduler.has_work:
        batch = scheduler.schedule(64, 0.0)
        order += [output.id for output in scheduler.update_from_output(batch, workers.execute(batch))]
    assert order == [2, 3, 1]


@pytest.mark.parametrize("lack", [{"max_num_seqs": 3}, {"num_blocks": 12}], ids=["indices", "blocks"])
@pytest.mark.parametrize("ahead", [False, True])
def test_the_lowest_priority_makes_way(lack: dict[str, int], ahead: bool) -> None:
    scheduler = make(max_model_len=40, async_scheduling=ahead, **lack)
    sampling = sampling_of(9)
    wanted = {
        n: EngineCoreRequest(id=n, prompt_ids=[n] * 5, sampling=sampling, priority=LOWEST_PRIORITY) for n in range(3)
    }
    wanted |= {n: EngineCoreRequest(id=n, prompt_ids=[n] * 12, sampling=sampling) for n in (3, 4)}
    arrivals = {0: [(wanted[n], False) for n in range(3)], 3: [(wanted[n], False) for n in (3, 4)]}
    got = drive(scheduler, FakeWorkers(FULL), arrivals, 64, 1 + ahead, ahead)
    for number, request in wanted.items():
        assert [i for output in got[number] for i in output.token_ids] == expected_output(request)[0]
    assert list(got) == [0, 1, 2, 3, 4] and scheduler.stats().num_preemptions >= 2
    assert max(got[n][0].queued_seconds for n in (3, 4)) <= 4 + 2 * ahead  # steps after their arrival


@pytest.mark.parametrize("ahead", [False, True])
def test_batches_pause_but_for_a_share(ahead: bool) -> None:
    scheduler, workers = make(max_model_len=400, async_scheduling=ahead), FakeWorkers(FULL)
    lines = [
        EngineCoreRequest(id=n, prompt_ids=[n] * 5, sampling=sampling_of(300), priority=LOWEST_PRIORITY)
        for n in range(4)
    ]
    for request in lines:
        scheduler.add(request, 0.0)
    run_step(scheduler, workers)
    scheduler.add(EngineCoreRequest(id=9, prompt_ids=[9] * 24, sampling=sampling_of(200)), 0.0)
    counts = [run_step(scheduler, workers) for _ in range(100)]
    assert counts[0] == {9: 24}, "its first token does not wait for batches"
    assert counts[1] == {9: 1, 0: 1, 1: 1, 2: 1}  # one token for every eight of the other tenant
    of_batches = sum(count for step in counts for request_id, count in step.items() if request_id != 9)
    assert of_batches == (24 + 99) // 8 and all(step[9] == 1 for step in counts[1:])
    scheduler.abort(9)
    assert run_step(scheduler, workers).keys() == {0, 1, 2, 3}


def test_a_batch_goes_on_beside_prompts_that_do_not_end() -> None:
    scheduler, workers = make(max_model_len=400, max_chunk=16), FakeWorkers(FULL)
    scheduler.add(EngineCoreRequest(id=0, prompt_ids=[5] * 5, sampling=sampling_of(300), priority=LOWEST_PRIORITY), 0.0)
    run_step(scheduler, workers)
    scheduler.add(EngineCoreRequest(id=9, prompt_ids=[9] * 390, sampling=sampling_of(2)), 0.0)
    counts = [run_step(scheduler, workers) for _ in range(18)]
    assert [index for index, step in enumerate(counts) if 0 in step] == [8, 17]


def test_a_line_of_a_batch_starts_beside_others() -> None:
    scheduler, workers = make(max_model_len=400), FakeWorkers(FULL)
    scheduler.add(EngineCoreRequest(id=9, prompt_ids=[9] * 24, sampling=sampling_of(300)), 0.0)
    scheduler.add(EngineCoreRequest(id=0, prompt_ids=[5] * 10, sampling=sampling_of(5), priority=LOWEST_PRIORITY), 0.0)
    counts = [run_step(scheduler, workers) for _ in range(100)]
    assert sum(step.get(0, 0) for step in counts) == 10 + 4 and max(step.get(0, 0) for step in counts) <= 3


@pytest.mark.parametrize("blocked", ["by its prefix", "by a long prompt"])
def test_a_prompt_of_a_batch_holds_nobody_up(blocked: str) -> None:
    scheduler, workers = make(max_model_len=400, max_chunk=16, max_num_seqs=2), FakeWorkers(FULL)
    prompt = list(range(100))
    scheduler.add(EngineCoreRequest(id=0, prompt_ids=prompt, sampling=sampling_of(5), priority=LOWEST_PRIORITY), 0.0)
    run_step(scheduler, workers, 16)
    other = prompt[:60] if blocked == "by its prefix" else [3] * 60
    scheduler.add(EngineCoreRequest(id=9, prompt_ids=other, sampling=sampling_of(5)), 0.0)
    steps = 1
    while run_step(scheduler, workers, 16).get(9, 0) != 1:
        steps += 1
        assert steps < 8
    while scheduler.has_work:
        run_step(scheduler, workers, 16)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_gives_up_the_slot_of_an_adapter(ahead: bool) -> None:
    scheduler, workers = make(max_loras=1, async_scheduling=ahead), FakeWorkers(FULL)
    adapters = [Adapter(f"a{n}", f"/a{n}", f"digest {n}") for n in range(2)]
    line = EngineCoreRequest(
        id=0, prompt_ids=[1] * 5, sampling=sampling_of(30), priority=LOWEST_PRIORITY, adapter=adapters[0]
    )
    other = EngineCoreRequest(id=1, prompt_ids=[2] * 5, sampling=sampling_of(9), adapter=adapters[1])
    got = drive(scheduler, workers, {0: [(line, False)], 3: [(other, False)]}, 64, 1 + ahead, ahead)
    assert got[1][0].queued_seconds <= 2 + 2 * ahead  # steps
    for request in (line, other):
        assert [i for output in got[request.id] for i in output.token_ids] == expected_output(request)[0]


def test_other_priorities_do_not_make_way() -> None:
    scheduler = make(max_num_seqs=1)
    sampling = sampling_of(9)
    arrivals = {n: [(EngineCoreRequest(id=n, prompt_ids=[n], sampling=sampling, priority=-n), False)] for n in range(2)}
    drive(scheduler, FakeWorkers(FULL), arrivals, 64, 1)
    assert scheduler.stats().num_preemptions == 0


def test_batches_under_way_share_the_sequences() -> None:
    scheduler, workers = make(max_num_seqs=7), FakeWorkers(FULL)
    for number in range(7):
        scheduler.add(EngineCoreRequest(id=number, prompt_ids=[number] * 3, sampling=sampling_of(30)), 0.0)
    under_way: list[tuple[SchedulerOutput, list[RunnerOutput]]] = []
    for step in range(25):
        while len(under_way) < 3:
            batch = scheduler.schedule(64, 0.0, 3)
            assert 1 <= len(batch.scheduled) <= 3, f"a stage has nothing to do in step {step}"
            under_way.append((batch, workers.execute(batch)))
        assert sum(len(batch.scheduled) for batch, _ in under_way) == 7  # every request is in flight
        scheduler.update_from_output(*under_way.pop(0))


def test_sampled_ids_reach_the_workers_with_the_next_chunk() -> None:
    scheduler, workers = make(), FakeWorkers(FULL)
    scheduler.add(EngineCoreRequest(id=0, prompt_ids=[1, 2, 3], sampling=sampling_of(4)), 0.0)
    sampled: list[int | None] = []
    while scheduler.has_work:
        batch = scheduler.schedule(64, 0.0)
        assert batch.scheduled[0].new_token_ids == sampled[-1:]
        results = workers.execute(batch)
        sampled.append(results[0].token_id)
        scheduler.update_from_output(batch, results)
    assert workers.ids[0] == [1, 2, 3, *sampled[:-1]]


def test_the_next_step_does_not_wait_for_the_last_ones_ids() -> None:
    scheduler, workers = make(async_scheduling=True), FakeWorkers(FULL)
    scheduler.add(EngineCoreRequest(id=0, prompt_ids=[1, 2, 3], sampling=sampling_of(4)), 0.0)
    penalty = Sampling(max_tokens=4, seed=0, repetition_penalty=1.1)
    scheduler.add(EngineCoreRequest(id=1, prompt_ids=[4], sampling=penalty), 0.0)
    first = scheduler.schedule(64, 0.0)
    results = workers.execute(first)
    second = scheduler.schedule(64, 0.0)
    (chunk,) = second.scheduled
    assert (chunk.req_index, chunk.start, chunk.count, chunk.new_token_ids) == (0, 3, 1, [])
    scheduler.update_from_output(first, results)
    third = scheduler.schedule(64, 0.0)
    assert [chunk.req_index for chunk in third.scheduled] == [0, 1], "a request that reads all its ids has them now"


def test_what_was_computed_past_the_end_is_let_go() -> None:
    scheduler, workers = make(async_scheduling=True), FakeWorkers(FULL)
    first_id = token_after([1, 2, 3])
    sampling = Sampling(max_tokens=9, seed=0, stop_token_ids=(first_id,))
    scheduler.add(EngineCoreRequest(id=0, prompt_ids=[1, 2, 3], sampling=sampling), 0.0)
    under_way = [(batch := scheduler.schedule(64, 0.0), workers.execute(batch)) for _ in range(2)]
    (output,) = scheduler.update_from_output(*under_way[0])
    assert output.finish_reason is FinishReason.STOP and scheduler.stats().kv_cache_usage > 0, (
        "a step still writes there"
    )
    assert not scheduler.schedule(64, 0.0).scheduled and scheduler.has_work
    assert scheduler.update_from_output(*under_way[1]) == [] and scheduler.stats().kv_cache_usage == 0


def test_small_requests_that_keep_coming_do_not_starve_a_large_one() -> None:
    """With several batches in flight, the newest request is always in flight, and is not preempted for older ones."""
    scheduler, workers = make(num_blocks=14, max_chunk=8, prefix_caching=False), FakeWorkers(FULL)
    large = EngineCoreRequest(id=0, prompt_ids=[1] * 40, sampling=sampling_of(2))
    under_way: list[tuple[SchedulerOutput, list[RunnerOutput]]] = []
    for step in range(300):
        small = EngineCoreRequest(id=step + 1, prompt_ids=[step % 40 + 2] * 6, sampling=sampling_of(3))
        assert scheduler.add(small, float(step)) is None
        if step == 3:
            assert scheduler.add(large, float(step)) is None
        while len(under_way) < 2 and (batch := scheduler.schedule(16, float(step), 2)).scheduled:
            under_way.append((batch, workers.execute(batch)))
        for output in scheduler.update_from_output(*under_way.pop(0)):
            if output.id == large.id and output.finish_reason is not None:
                return
        scheduler.check_integrity()
    raise AssertionError("the large request never ended")


def answers(batch: SchedulerOutput) -> list[RunnerOutput]:
    """Return some token for each row that samples."""
    return [RunnerOutput(token_id=9 if chunk.sample else None) for chunk in batch.scheduled]


def test_a_long_prompt_does_not_hold_up_short_ones() -> None:
    """With a 30,000-token prompt running, requests are admitted at once and streams get a token in every step."""
    scheduler = make(num_blocks=10_000, max_model_len=40_000, max_chunk=512, prefix_caching=False)
    workers = FakeWorkers(FULL)
    scheduler.add(EngineCoreRequest(id=0, prompt_ids=[2] * 5, sampling=sampling_of(1000)), 0.0)
    scheduler.update_from_output(batch := scheduler.schedule(512, 0.0), workers.execute(batch))
    scheduler.add(EngineCoreRequest(id=1, prompt_ids=[1] * 30_000, sampling=sampling_of(1)), 0.0)
    first: dict[int, int] = {}
    step = 0
    while 1 not in first:
        if step % 10 == 0:
            prompt = [3 + step % 7] * 400  # more than half a step
            scheduler.add(EngineCoreRequest(id=2 + step, prompt_ids=prompt, sampling=sampling_of(1)), 0.0)
        batch = scheduler.schedule(512, 0.0)
        is_last = any(chunk.req_index == 1 and chunk.sample for chunk in batch.scheduled)
        assert batch.num_tokens == 512 or is_last, "the long prompt takes what the others leave"
        got = {output.id for output in scheduler.update_from_output(batch, answers(batch))}
        assert 0 in got
        first |= {number: step for number in got if number not in first}
        step += 1
    waited = [at - (number - 2) for number, at in first.items() if number > 1]
    assert len(waited) >= 6 and max(waited) <= 2, "the step under way, its own step, and one more for more than half"
    assert step <= 30_000 / 440, "it is not much later for it"


def test_long_prompts_go_one_after_another() -> None:
    scheduler = make(num_blocks=1000, max_model_len=1000, max_chunk=64, prefix_caching=False)
    for number in range(3):
        scheduler.add(EngineCoreRequest(id=number, prompt_ids=[number] * 200, sampling=sampling_of(1)), 0.0)
    order: list[int] = []
    while scheduler.has_work:
        batch = scheduler.schedule(64, 0.0)
        assert len(batch.scheduled) <= 2, "the end of one and the beginning of the next"
        order += [output.id for output in scheduler.update_from_output(batch, answers(batch))]
    assert order == [0, 1, 2]


def test_a_heavy_tenant_does_not_starve_a_light_one() -> None:
    scheduler = make(num_blocks=200, max_num_seqs=2, prefix_caching=False)
    for number in range(40):
        request = EngineCoreRequest(id=number, prompt_ids=[number] * 20, sampling=sampling_of(5), tenant=0)
        scheduler.add(request, 0.0)
    for number in range(40, 44):
        request = EngineCoreRequest(id=number, prompt_ids=[number] * 20, sampling=sampling_of(5), tenant=1)
        scheduler.add(request, 0.0)
    order: list[int] = []
    while scheduler.has_work:
        batch = scheduler.schedule(64, 0.0)
        outputs = scheduler.update_from_output(batch, answers(batch))
        order += [output.id for output in outputs if output.finish_reason is not None]
        scheduler.check_integrity()
    assert {40, 41, 42, 43} <= set(order[:8]), "every other one is the light tenant's"


def test_blocks_are_sent_once() -> None:
    scheduler = Scheduler(MIXED, 64, max_num_seqs=1, max_model_len=64, max_chunk=64, prefix_caching=False)
    scheduler.add(EngineCoreRequest(id=1, prompt_ids=[1] * 6, sampling=sampling_of(9)), 0.0)
    found = []
    for _ in range(4):
        batch = scheduler.schedule(64, 0.0)
        found.append([len(blocks) for blocks in batch.scheduled[0].new_blocks])
        scheduler.update_from_output(batch, [RunnerOutput(token_id=9)])
    assert found == [[2, 1], [], [], [1, 1]], "6 tokens, then one each: the ninth needs a block of 4 and one of 8"
