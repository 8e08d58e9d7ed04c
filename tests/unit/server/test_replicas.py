"""Data-parallel replicas: routing of requests and aborts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, EPLBStats, Sampling, SchedulerStats
from serve_llm.server.admission.controller import AdmissionController, AdmissionRequest
from serve_llm.server.engines.replica import Replica
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.generate.dispatcher import LocalDispatcher
from support.asgi import Call
from support.fakes import ScriptedEngine, make_model_info
from support.serving import Served

Serve = Callable[..., Served]


def engines(number: int, **changed: object) -> list[ScriptedEngine]:
    return [ScriptedEngine(lambda request: [5], automatic=False, **changed) for _ in range(number)]


def request(number: int, prompt_ids: list[int], choice: int = 0, max_tokens: int = 2) -> EngineCoreRequest:
    return EngineCoreRequest(
        id=number, prompt_ids=prompt_ids, sampling=Sampling(max_tokens=max_tokens, seed=0, choice=choice)
    )


def discard(output: EngineCoreOutput) -> None:
    """A sink that drops its outputs."""


def submit(replicas: Replicas, requests: list[EngineCoreRequest]) -> list[int]:
    """Submit requests. Returns the engine of each."""
    return [tracked.engine for tracked in replicas.submit_many([(one, discard) for one in requests])]


def test_choices_of_a_prompt_stay_together_and_prompts_are_spread() -> None:
    async def run() -> None:
        both = engines(2)
        replicas = Replicas(both)
        prompts = [[1] * 40, [2] * 40, [1] * 40, [3]]
        requests = [request(4 * k + choice, prompt, choice) for k, prompt in enumerate(prompts) for choice in range(4)]
        placed = submit(replicas, requests)
        assert [placed[4 * k] for k in range(4)] == [0, 1, 0, 1]
        assert all(len({*placed[4 * k : 4 * k + 4]}) == 1 for k in range(4))
        assert [[one.id for one in engine.submitted] for engine in both] == [
            [one.id for one, index in zip(requests, placed, strict=True) if index == which] for which in (0, 1)
        ]

    asyncio.run(run())


def test_ids_are_unique_over_all_engines() -> None:
    async def run() -> None:
        replicas = Replicas(engines(3))
        assert len({replicas.next_id() for _ in range(100)}) == 100

    asyncio.run(run())


def test_aborts_go_to_the_engine_of_the_request() -> None:
    async def run() -> None:
        both = engines(2)
        replicas = Replicas(both)
        placed = submit(replicas, [request(number, [number]) for number in range(6)])
        replicas.abort([1, 2, 5, 77])
        assert [sorted(engine.aborted) for engine in both] == [
            [number for number in (1, 2, 5) if placed[number] == which] for which in (0, 1)
        ]
        replicas.abort([1])
        assert sum(len(engine.aborted) for engine in both) == 3, "it had ended already"

    asyncio.run(run())


def test_a_submission_that_fails_is_withdrawn_from_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OverflowError("a number is too large for a message")

    async def run() -> None:
        both = engines(2)
        replicas = Replicas(both)
        admission = AdmissionController(replicas, (8, 2**30))
        dispatcher = LocalDispatcher(replicas, admission)
        pairs = [(request(number, [number] * 40), discard) for number in (1, 2)]
        monkeypatch.setattr(both[1], "submit_many", fail)
        admitted = AdmissionRequest(
            tenant=0, priority=0, max_tokens=2, deadline=None, fail=discard, num_waiting=2, num_waiting_tokens=80
        )
        with pytest.raises(OverflowError):
            dispatcher.submit(admitted, pairs, discard)
        assert [one.id for one in both[0].submitted] == both[0].aborted == [1]
        assert [replicas.count_open(index) for index in (0, 1)] == [0, 0]
        assert admission.num_open == 0

    asyncio.run(run())


def test_load_follows_outputs_and_ends() -> None:
    async def run() -> None:
        both = engines(2)
        replicas = Replicas(both)
        assert submit(replicas, [request(0, [1] * 5000, max_tokens=3)]) == [0]
        assert submit(replicas, [request(n, [n], max_tokens=1) for n in (1, 2, 3)]) == [1, 1, 1]
        both[0].step()  # its prompt is computed: one open request, compared with three
        assert submit(replicas, [request(4, [9])]) == [0]
        both[1].step()  # all its requests end
        assert submit(replicas, [request(5, [8])]) == [1]
        assert [engine.meter.step_tokens.sum for engine in both] == [1, 3], "each engine counts its own steps"

    asyncio.run(run())


def test_without_prefix_caching_equal_prompts_are_spread() -> None:
    async def run() -> None:
        replicas = Replicas(engines(2), prefix_caching=False)
        assert submit(replicas, [request(number, [1] * 2000) for number in range(4)]) == [0, 1, 0, 1]

    asyncio.run(run())


def test_blocks_in_host_memory_count_for_routing() -> None:
    async def run() -> None:
        replicas = Replicas(engines(2, model_info=make_model_info(num_kv_blocks=70, num_offload_blocks=30)))
        assert replicas._router is not None and replicas._router._capacities == [100, 100]

    asyncio.run(run())


def test_replicas_are_ready_when_one_is_and_share_the_smallest_cache() -> None:
    async def run() -> None:
        both = engines(2)
        both[1].model_info = make_model_info(num_kv_blocks=100, kv_cache_tokens=1600)
        replicas = Replicas(both)
        assert replicas.ready and replicas.model_info.kv_cache_tokens == 1600
        both[1].ready = False
        assert replicas.ready
        both[0].ready = False
        assert not replicas.ready

    asyncio.run(run())


def test_an_engine_that_is_not_ready_gets_no_requests() -> None:
    async def run() -> None:
        both = engines(2)
        replicas = Replicas(both)
        both[1].ready = False
        assert submit(replicas, [request(number, [number]) for number in range(4)]) == [0] * 4

    asyncio.run(run())


def test_a_disconnect_frees_choices_on_every_engine(serve: Serve) -> None:
    async def run() -> None:
        served = serve(num_engines=2, automatic=False)
        body = {"prompt": ["one", "two", "three"], "n": 2, "max_tokens": 50, "stream": True}
        call = Call(served.app, "POST", "/v1/completions", body)
        while sum(len(engine.open) for engine in served.engines) < 6:
            await served.engine.changed.wait()
        assert sorted(len(engine.open) for engine in served.engines) == [2, 4]
        for engine in served.engines:
            engine.step()
        call.leave()
        await call.finished
        assert all(engine.open == {} for engine in served.engines)
        assert sum(len(engine.aborted) for engine in served.engines) == 6

    asyncio.run(run())


def test_choices_are_ordered_by_prompt_on_any_engine(serve: Serve, served: Served) -> None:
    prompts = ["one", "two", "three", "four"]
    by_prompt = {tuple(served.ids(prompt)): served.ids(prompt.upper()) for prompt in prompts}
    several = serve(num_engines=3, script=lambda request: by_prompt[tuple(request.prompt_ids)])
    reply = several.complete(prompt=prompts, max_tokens=9).json()
    for prompt, choice in zip(prompts, reply["choices"], strict=True):
        assert choice["text"].startswith(prompt.upper())
    assert all(engine.submitted for engine in several.engines)


def test_an_added_engine_gets_requests_and_a_draining_one_gets_no_more() -> None:
    async def run() -> None:
        both = engines(2)
        replicas = Replicas(both[:1], spare_meters=[both[1].meter])
        assert len(replicas.active) == 1 and submit(replicas, [request(n, [n]) for n in (1, 2)]) == [0, 0]
        replicas.join({1: both[1]})
        assert len(replicas.active) == 2 and submit(replicas, [request(n, [n]) for n in (3, 4)]) == [1, 1]
        replicas.drain(1)
        assert not replicas.engines[1].ready and replicas.count_open(1) == 2
        assert submit(replicas, [request(n, [n]) for n in range(5, 50)]) == [0] * 45
        both[1].step()
        both[1].step()
        assert replicas.count_open(1) == 0, "its requests have ended there"

    asyncio.run(run())


def test_requests_of_a_removed_engine_continue_elsewhere() -> None:
    async def run() -> None:
        both = [ScriptedEngine(lambda request: [5, 6, 7, 8], automatic=False) for _ in range(2)]
        replicas = Replicas(both)
        received: list[int] = []
        pairs = [
            (request(101, [1] * 40, max_tokens=1), discard),
            (request(102, [2] * 40, max_tokens=4), keep_in(received)),
        ]
        first, moved = replicas.submit_many(pairs)
        assert (first.engine, moved.engine) == (0, 1)
        both[1].step()
        replicas.drain(1)
        replicas.retire(1)
        assert not both[1].open and moved.engine == 0 and moved.replays[0].cause == "engine 1 is removed"
        for _ in range(3):
            both[0].step()
        assert received == [5, 6, 7, 8], "each token once"
        assert [engine.has_served for engine in replicas.engines] == [True, True]
        assert len(replicas.active) == 1 and replicas.engines[1].stats.num_steps == 1, "its counters stay"
        submit(replicas, [request(n, [2] * 40) for n in range(110, 114)])
        assert len(both[0].open) == 4

    asyncio.run(run())


def test_counters_of_the_expert_load_balancer_outlive_a_process() -> None:
    first, second = ScriptedEngine(lambda request: [5]), ScriptedEngine(lambda request: [5])
    replica = Replica(first.meter, first)
    assert replica.stats.eplb is None
    first.stats = SchedulerStats(eplb=EPLBStats(2, 4, 400, 5.0, 8.0, 6.0))
    replica.mark_lost()
    assert replica.stats.eplb == EPLBStats(2, 4, 400)
    replica.replace(second)
    assert replica.stats.eplb == EPLBStats(2, 4, 400)
    second.stats = SchedulerStats(eplb=EPLBStats(1, 3, 300, 5.0, 8.0, 6.0))
    assert replica.stats.eplb == EPLBStats(3, 7, 700, 5.0, 8.0, 6.0)


def keep_in(ids: list[int]) -> Callable[[EngineCoreOutput], None]:
    return lambda output: ids.extend(output.token_ids)
