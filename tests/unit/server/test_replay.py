"""After an engine's death, its requests continue elsewhere, and the quarantine finds a request that kills engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest

from serve_llm.common.errors import EngineDead
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason, Sampling, SchedulerStats
from serve_llm.server.engines.quarantine import CLEARING_TOKENS, SUSPECT_DEATHS
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.metrics.meter import Clock, Meter
from support.asgi import Call
from support.fakes import ScriptedEngine, make_model_info
from support.serving import Served

Serve = Callable[..., Served]
DEAD = EngineDead("it died")


class Sink:
    """Collects all outputs of one request."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.outputs: list[EngineCoreOutput] = []

    def __call__(self, output: EngineCoreOutput) -> None:
        assert not self.outputs or self.outputs[-1].finish_reason is None, "output after the final one"
        self.ids += output.token_ids
        self.outputs.append(output)

    @property
    def reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None


class Deployment:
    """Replicas on scripted engines that generate 100, 101, 102, ... for every request."""

    def __init__(self, number: int = 1) -> None:
        clock = Clock()
        self.meters = [Meter(clock) for _ in range(number)]
        self.engines = [self.new_engine(index) for index in range(number)]
        self.replicas = Replicas(self.engines)

    def new_engine(self, index: int) -> ScriptedEngine:
        return ScriptedEngine(
            lambda request: range(100, 1000), automatic=False, cached_tokens=3, meter=self.meters[index]
        )

    def submit(self, number: int, max_tokens: int = 40, **sampling: object) -> list[Sink]:
        sinks = [Sink() for _ in range(number)]
        chosen = Sampling(max_tokens=max_tokens, seed=7, **sampling)
        requests = [EngineCoreRequest(id=self.replicas.next_id(), prompt_ids=[1, 2, 3], sampling=chosen) for _ in sinks]
        self.replicas.submit_many(zip(requests, sinks, strict=True))
        return sinks

    def kill(self, index: int = 0, in_step: Sequence[int] | None = None) -> None:
        """Kill an engine. in_step: engine request ids of the step in which it dies; None: all of its requests."""
        engine = self.engines[index]
        engine.ready = False
        self.replicas.drop_lost({index: list(engine.open) if in_step is None else in_step}, DEAD)

    def restart(self, index: int = 0) -> None:
        self.engines[index] = self.new_engine(index)
        self.replicas.join({index: self.engines[index]})


def test_a_request_continues_after_its_received_tokens() -> None:
    async def run() -> None:
        one = Deployment()
        (sink,) = one.submit(1, max_tokens=6, prompt_logprobs=0)
        one.engines[0].step()
        one.engines[0].step()
        one.kill()
        assert not one.replicas.ready and sink.ids == [100, 101] and sink.reason is None
        one.restart()
        (again,) = one.engines[0].submitted
        assert again.output_ids == [100, 101] and again.sampling.seed == 7 and again.prompt_ids == [1, 2, 3]
        assert again.sampling.max_tokens == 6 and again.sampling.prompt_logprobs is None
        while sink.reason is None:
            one.engines[0].step()
        assert sink.ids == [100, 101, 102, 103, 104, 105] and sink.reason is FinishReason.LENGTH
        assert [output.cached_tokens for output in sink.outputs] == [3] + [None] * 5, (
            "only those of the first admission"
        )
        assert one.engines[0].open == {} and one.replicas.num_finished == 1
        meter = one.replicas.engines[0].meter
        assert (meter.replayed_requests, meter.replayed_tokens) == (1, 5)

    asyncio.run(run())


def test_a_request_without_output_is_submitted_unchanged() -> None:
    async def run() -> None:
        one = Deployment()
        (sink,) = one.submit(1, prompt_logprobs=2)
        (before,) = one.engines[0].submitted
        one.kill()
        one.restart()
        (again,) = one.engines[0].submitted
        assert again.sampling == before.sampling and again.output_ids == [] and again.id != before.id
        one.engines[0].step()
        assert sink.outputs[0].cached_tokens == 3 and sink.outputs[0].prompt_logprobs is not None

    asyncio.run(run())


def test_other_engines_take_over_at_once() -> None:
    async def run() -> None:
        two = Deployment(2)
        sinks = [sink for _ in range(4) for sink in two.submit(1)]
        assert [len(engine.open) for engine in two.engines] == [2, 2]
        two.engines[1].step()
        two.kill(1)
        assert two.replicas.ready and len(two.engines[0].open) == 4
        two.restart(1)
        assert len(two.engines[1].open) == 0, "requests that moved stay there"
        two.submit(1)
        assert len(two.engines[1].open) == 1
        for _ in range(40):
            two.engines[0].step()
        assert all(sink.ids == list(range(100, 140)) for sink in sinks)

    asyncio.run(run())


@pytest.mark.parametrize("is_guilty", [False, True])
def test_a_suspect_runs_alone_when_the_engines_that_it_lost_are_removed(is_guilty: bool) -> None:
    """Otherwise it would wait for one of them to be replaced."""

    async def run() -> None:
        three = Deployment(3)
        other, suspect = [sink for _ in range(2) for sink in three.submit(1)]
        three.engines[0].step()
        for index in (1, 2):
            assert len(three.engines[index].open) == 1
            three.kill(index)
        three.replicas.retire(2)
        assert len(three.engines[0].open) == 1 and not suspect.outputs, "engine 1 may come back"
        three.replicas.retire(1)
        assert len(three.engines[0].open) == 1 and three.engines[0].submitted[-1].output_ids == []
        if is_guilty:
            three.kill(0)
            assert suspect.reason is FinishReason.ERROR
            three.restart(0)
        while other.reason is None:
            three.engines[0].step()
        assert other.ids == list(range(100, 140)) and (is_guilty or suspect.ids == other.ids)

    asyncio.run(run())


def test_an_expert_parallel_group_is_lost_and_replaced_together() -> None:
    async def run() -> None:
        two = Deployment(2)
        sinks = [sink for _ in range(4) for sink in two.submit(1)]
        for _ in range(SUSPECT_DEATHS):
            for engine in two.engines:
                engine.step()
            guilty = list(two.engines[1].open)
            assert not two.replicas.drop_lost({0: (), 1: guilty}, DEAD)
            assert all(engine.is_lost for engine in two.replicas.engines)
            two.engines = [two.new_engine(index) for index in range(2)]
            two.replicas.join(dict(enumerate(two.engines)))
            placed = [len(engine.open) for engine in two.engines]
        assert placed == [1, 2], "one of engine 1's two suspects runs alone, the other waits"
        while not all(sink.reason for sink in sinks):
            for engine in two.engines:
                engine.step()
        assert all(sink.ids == list(range(100, 140)) for sink in sinks)

    asyncio.run(run())


def test_requests_wait_without_an_engine_and_can_be_aborted() -> None:
    async def run() -> None:
        one = Deployment()
        one.kill()
        one.submit(2)
        one.replicas.abort([1])
        one.restart()
        assert [request.id for request in one.engines[0].submitted] == [2]

    asyncio.run(run())


def test_requests_are_sent_to_an_unresponsive_engine_if_there_is_no_other() -> None:
    """The engine may only be slow, and nothing reports when it continues."""

    async def run() -> None:
        one = Deployment()
        engine = one.engines[0]
        engine.ready, sent = False, []
        engine.submit_many = sent.extend  # type: ignore[method-assign,assignment]
        one.submit(2)
        assert len(sent) == 2

    asyncio.run(run())


def test_a_replayed_request_has_a_new_id() -> None:
    """Thus the client drops late outputs of the lost engine."""

    async def run() -> None:
        one = Deployment()
        one.submit(1)
        (before,) = one.engines[0].open
        one.kill()
        one.restart()
        assert list(one.engines[0].open) != [before]

    asyncio.run(run())


def test_the_request_that_kills_engines_ends_and_all_others_finish() -> None:
    async def run() -> None:
        one = Deployment()
        sinks = one.submit(4)
        for _ in range(2):
            one.kill()
            one.restart()
        killer = 2
        isolated = []
        while sinks[killer].reason is None:
            (alone,) = one.engines[0].open.values()
            isolated.append(alone.sink.__self__.id)  # type: ignore[attr-defined]
            if isolated[-1] == killer + 1:
                one.kill()
                assert sinks[killer].reason is FinishReason.ERROR
                one.restart()
            else:
                for _ in range(CLEARING_TOKENS):
                    one.engines[0].step()
        assert isolated == [4, 3], "the newest first"
        error = sinks[killer].outputs[-1].error
        assert error == "this request crashed the engine 3 times, the last time alone: it died"
        assert len(one.engines[0].open) == 3, "the others are no longer suspects"
        for _ in range(40):
            one.engines[0].step()
        assert [sink.ids for sink in sinks] == [list(range(100, 140))] * 2 + [[]] + [list(range(100, 140))]
        assert one.replicas.num_finished == 3

    asyncio.run(run())


def test_requests_with_progress_or_outside_the_step_are_not_suspects() -> None:
    async def run() -> None:
        one = Deployment()
        sinks = one.submit(3, max_tokens=60)
        for _ in range(5):  # with progress in between
            one.kill()
            one.restart()
            assert len(one.engines[0].open) == 3
            for _ in range(CLEARING_TOKENS):
                one.engines[0].step()
        for _ in range(5):  # between two steps
            one.kill(in_step=[])
            one.restart()
            assert len(one.engines[0].open) == 3
        assert all(sink.ids == list(range(100, 100 + 5 * CLEARING_TOKENS)) for sink in sinks)

    asyncio.run(run())


def test_the_next_suspect_runs_when_one_is_aborted() -> None:
    async def run() -> None:
        one = Deployment()
        one.submit(3)
        for _ in range(2):
            one.kill()
            one.restart()
        one.submit(1)
        assert len(one.engines[0].open) == 1, "a new request waits too"
        one.replicas.abort([1])
        assert len(one.engines[0].open) == 1
        one.replicas.abort([2, 3])
        assert len(one.engines[0].open) == 1 and one.engines[0].submitted[-1].output_ids == []
        one.submit(1)
        assert len(one.engines[0].open) == 2

    asyncio.run(run())


def test_other_requests_run_on_the_engines_without_a_suspect() -> None:
    async def run() -> None:
        two = Deployment(2)
        two.kill(1)
        sinks = two.submit(2)
        two.kill(0)
        two.restart(1)
        two.kill(1)
        two.restart(0)
        two.restart(1)
        assert len(two.engines[0].open) == 1 and two.engines[1].open == {}
        others = two.submit(3)
        assert len(two.engines[0].open) == 1 and len(two.engines[1].open) == 3
        for _ in range(60):
            for engine in two.engines:
                engine.step()
        assert all(sink.ids == list(range(100, 140)) for sink in [*sinks, *others])

    asyncio.run(run())


def test_give_up_ends_all_requests_with_the_cause() -> None:
    async def run() -> None:
        one = Deployment()
        (sink,) = one.submit(1)
        one.engines[0].step()
        one.kill()
        one.replicas.give_up(DEAD)
        assert sink.reason is FinishReason.ERROR and sink.outputs[-1].error == "it died"
        with pytest.raises(EngineDead, match="it died"):
            one.submit(1)

    asyncio.run(run())


def test_counters_never_decrease() -> None:
    async def run() -> None:
        one = Deployment()
        one.engines[0].stats = SchedulerStats(2, 1, 0.5, 100, 40, 5, 9, 7, 6, 20, 8)
        one.kill()
        assert one.replicas.engines[0].stats == SchedulerStats(0, 0, 0.0, 100, 40, 5, 9, 0, 6, 20, 8)
        one.restart()
        one.engines[0].stats = SchedulerStats(1, 0, 0.25, 10, 4, 1, 2, 3, 1, 2, 2)
        assert one.replicas.engines[0].stats == SchedulerStats(1, 0, 0.25, 110, 44, 6, 11, 3, 7, 22, 10)

    asyncio.run(run())


def test_model_info_is_that_of_the_newest_process() -> None:
    async def run() -> None:
        one = Deployment()
        one.kill()
        replaced = ScriptedEngine(lambda request: [5], model_info=make_model_info(num_kv_blocks=77))
        one.replicas.join({0: replaced})
        assert one.replicas.model_info.num_kv_blocks == 77

    asyncio.run(run())


def test_text_and_usage_are_those_of_an_undisturbed_run(serve: Serve) -> None:
    """With several choices and a partly received stop string."""
    text = "one two three four. five six"
    body = {"prompt": "x", "n": 2, "max_tokens": 50, "stop": ["four. f"], "logprobs": 1, "stream_options": None}

    def answer(kill_after: int | None) -> tuple[list[str], dict[str, int]]:
        async def run() -> bytes:
            served = serve(text, automatic=False)
            call = Call(served.app, "POST", "/v1/completions", {k: v for k, v in body.items() if v is not None})
            engine, steps = served.engine, 0
            while not call.finished.done():
                if engine.open:
                    engine.step()
                    steps += 1
                if steps == kill_after:
                    engine.ready = False
                    replicas = served.admission._replicas
                    replicas.drop_lost({0: list(engine.open)}, DEAD)
                    engine = ScriptedEngine(engine.script, automatic=False, meter=engine.meter)
                    replicas.join({0: engine})
                    steps += 1
                await asyncio.sleep(0)
            return (await call.reply()).content

        found = json.loads(asyncio.run(run()))
        return found["choices"], found["usage"]

    whole = answer(None)
    assert whole[0][0]["text"] == "one two three " and len(whole[0]) == 2
    for kill_after in (1, 3, 5):
        assert answer(kill_after) == whole
