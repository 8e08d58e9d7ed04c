"""More adapters than slots: no request waits until another one's text has ended."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.common.types import LOWEST_PRIORITY, Adapter, EngineCoreRequest, Sampling
from serve_llm.engine.scheduler.adapter_slots import AdapterSlots
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.scheduler.scheduler import Scheduler
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from support.scheduling import Arrival, Load, loads

NUM_ADAPTERS = 200
NUM_SLOTS = 8
LONG = 2500  # tokens


def ask(number: int, adapter: int | None, max_tokens: int) -> EngineCoreRequest:
    """Build a request. adapter: its number."""
    named = None if adapter is None else Adapter(f"a{adapter}", f"/a{adapter}", f"digest {adapter}")
    sampling = Sampling(max_tokens=max_tokens, seed=0)
    return EngineCoreRequest(id=number, prompt_ids=[1 + number % 7, 2, number], sampling=sampling, adapter=named)


def make_scheduler(num_rows: int = 256, num_slots: int = NUM_SLOTS) -> Scheduler:
    return Scheduler(
        (KVCacheSpec(64, None),),
        4000,
        max_num_seqs=num_rows,
        max_model_len=2 * LONG,
        max_chunk=4096,
        prefix_caching=True,
        max_loras=num_slots,
    )


class Run(NamedTuple):
    """The results of some requests."""

    queued: dict[int, float]  # steps until the first admission, by request id
    num_tokens: Counter[int]  # by request id
    num_loads: list[int]  # adapters loaded, by step


def run(scheduler: Scheduler, arrivals: dict[int, list[EngineCoreRequest]], depth: int = 1) -> Run:
    """arrivals: by step. depth: steps in flight."""
    found = Run({}, Counter(), [])
    slots: dict[int | None, str] = {}
    under_way: list[SchedulerOutput] = []
    waiting = dict(arrivals)
    step = 0
    while waiting or scheduler.has_work:
        for request in waiting.pop(step, []):
            assert scheduler.add(request, float(step)) is None
        under_way.append(scheduler.schedule(4096, float(step)))
        adapters = {new.adapter_slot: new.adapter.digest for new in under_way[-1].new_requests if new.adapter}
        found.num_loads.append(sum(slots.get(slot) != digest for slot, digest in adapters.items()))
        slots |= adapters
        if len(under_way) == depth:
            batch = under_way.pop(0)
            results = [RunnerOutput(token_id=1 if chunk.sample else None) for chunk in batch.scheduled]
            for output in scheduler.update_from_output(batch, results):
                found.num_tokens[output.id] += len(output.token_ids)
                if output.queued_seconds is not None:
                    found.queued.setdefault(output.id, output.queued_seconds)
        step += 1
        assert step < 20_000, "no progress"
    scheduler.check_integrity()
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_a_further_adapter_gets_a_slot_at_once(depth: int) -> None:
    """200 adapters, of which 8 are resident and generate long texts. A request for any other adapter only waits for
    steps in flight, and the step that admits it loads its adapter; requests for residents and for the base model do not
    wait at all."""
    arrivals = {0: [ask(number, number, LONG) for number in range(NUM_SLOTS)]}
    further = range(NUM_SLOTS, NUM_ADAPTERS)
    for count, number in enumerate(further):
        step = depth * (AdapterSlots.TURN + NUM_SLOTS + 10 * count)
        arrivals[step] = [ask(number, number, 2), ask(1000 + number, None, 2)]
    found = run(make_scheduler(), arrivals, depth)
    assert max(found.queued[number] for number in further) <= depth - 1
    assert max(found.queued[1000 + number] for number in further) == 0
    assert all(found.num_tokens[number] == LONG for number in range(NUM_SLOTS))


def test_two_adapters_that_arrive_together_are_loaded_together() -> None:
    """200 adapters, of which 8 fit, and four requests at a time, each for another adapter."""
    arrivals = {10 * step: [ask(4 * step + one, 4 * step + one, 2) for one in range(4)] for step in range(50)}
    found = run(make_scheduler(), arrivals)
    assert [found.queued[number] for number in range(200)] == [0, 0, 1, 1] * 50
    assert max(found.num_loads) == AdapterSlots.MAX_LOADS


def test_200_adapters_at_once_take_turns() -> None:
    """Each adapter has its first turn before any has a second one."""
    requests = [ask(number, number, 3 * AdapterSlots.TURN) for number in range(NUM_ADAPTERS)]
    found = run(make_scheduler(), {0: requests})
    turn = AdapterSlots.TURN + NUM_SLOTS  # slots are passed on one by one
    for number in range(NUM_ADAPTERS):
        assert found.queued[number] <= number // NUM_SLOTS * turn + NUM_SLOTS
    assert max(found.num_loads) == AdapterSlots.MAX_LOADS
    assert sum(found.num_loads) <= 4 * NUM_ADAPTERS


def test_requests_for_a_resident_adapter_go_past_one_that_waits_until_the_turn_is_over() -> None:
    arrivals = {step: [ask(step, 0, 3)] for step in range(200)}
    arrivals[5].append(ask(1000, 1, 3))
    found = run(make_scheduler(num_slots=1), arrivals)
    assert found.queued[6] == 0
    assert 1 < found.queued[1000] <= AdapterSlots.TURN


def test_a_request_at_the_front_gets_a_slot_of_a_full_server() -> None:
    """No request index is free, so the request whose turn is over gives up its own index too."""
    arrivals = {0: [ask(0, 0, LONG), ask(1, 1, LONG)], 50: [ask(2, 2, 5), ask(3, None, 5)]}
    found = run(make_scheduler(2, num_slots=2), arrivals)
    assert found.queued[2] == 0
    assert found.num_tokens == {0: LONG, 1: LONG, 2: 5, 3: 5}


def test_nobody_gives_up_a_slot_for_a_request_that_waits_for_more() -> None:
    scheduler = make_scheduler(2, num_slots=1)
    arrivals = {0: [ask(0, 0, 300), ask(1, None, 300)], 50: [ask(2, None, 5), ask(3, 1, 5)]}
    found = run(scheduler, arrivals)
    assert scheduler.stats().num_preemptions == 0
    assert found.queued[3] >= 249


specs = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(0, 20),
    st.sampled_from([0, 0, 1, LOWEST_PRIORITY]),
    st.sampled_from([None, 0, 1, 2, 3]),  # adapter
    st.integers(0, 12),
    st.booleans(),
)


@settings(max_examples=150)
@given(st.lists(specs, min_size=1, max_size=12), loads, st.integers(1, 2), st.integers(1, 3))
def test_random_loads(some: list[tuple], load: Load, num_slots: int, turn: int) -> None:
    arrivals = []
    for number, (prompt, max_tokens, priority, adapter, step, abort) in enumerate(some):
        named = None if adapter is None else Adapter(f"a{adapter}", f"/a{adapter}", f"digest {adapter}")
        sampling = Sampling(max_tokens=max_tokens, seed=0, stop_token_ids=(7,))
        request = EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling, priority=priority, adapter=named)
        arrivals.append(Arrival(request, step, abort))
    scheduler = load.build_scheduler(max_loras=num_slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdapterSlots, "TURN", turn)
        load.run(scheduler, arrivals)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
