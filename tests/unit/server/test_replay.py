"""An engine's death: its requests go on elsewhere with what was received, and the one that is its cause is found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

import pytest

from serve_llm.engine.errors import EngineDead
from serve_llm.engine.types import FinishReason, Output, Request, Sampling, Stats
from serve_llm.server.record import CLEARED
from serve_llm.server.replicas import SUSPECT, Replicas
from support.asgi import Call
from support.fakes import ScriptedEngine, facts
from support.serving import Served

Serve = Callable[..., Served]
DEAD = EngineDead("it died")


class Sink:
    """All outputs of one request."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.outputs: list[Output] = []

    def __call__(self, output: Output) -> None:
        assert not self.outputs or self.outputs[-1].finish_reason is None, "output after the final one"
        self.ids += output.token_ids
        self.outputs.append(output)

    @property
    def reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None


class Set:
    """Replicas on scripted engines that give 100, 101, 102, ... to every request."""

    def __init__(self, number: int = 1) -> None:
        self.engines = [self._engine() for _ in range(number)]
        self.replicas = Replicas(self.engines)

    def _engine(self) -> ScriptedEngine:
        return ScriptedEngine(lambda request: range(100, 1000), automatic=False, cached_tokens=3)

    def submit(self, number: int, max_tokens: int = 40, **sampling: object) -> list[Sink]:
        sinks = [Sink() for _ in range(number)]
        chosen = Sampling(max_tokens=max_tokens, seed=7, **sampling)
        requests = [Request(id=self.replicas.next_id(), prompt_ids=[1, 2, 3], sampling=chosen) for _ in sinks]
        self.replicas.submit_many(zip(requests, sinks, strict=True))
        return sinks

    def kill(self, index: int = 0, under_way: Sequence[int] | None = None) -> None:
        """under_way: ids of the engine; None: all that it has."""
        engine = self.engines[index]
        engine.ready = False
        self.replicas.lose({index: list(engine.open) if under_way is None else under_way}, DEAD)

    def restart(self, index: int = 0) -> None:
        self.engines[index] = self._engine()
        self.replicas.join({index: self.engines[index]})


def test_what_was_received_stays_and_the_rest_follows() -> None:
    async def run() -> None:
        one = Set()
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
        assert [output.cached_tokens for output in sink.outputs] == [3] + [None] * 5, "of the first admission only"
        assert one.engines[0].open == {} and one.replicas.num_finished == 1
        meter = one.replicas.engines[0].meter
        assert (meter.replayed_requests, meter.replayed_tokens) == (1, 5)

    asyncio.run(run())


def test_before_the_first_output_the_request_goes_as_it_was() -> None:
    async def run() -> None:
        one = Set()
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
        two = Set(2)
        sinks = [sink for _ in range(4) for sink in two.submit(1)]
        assert [len(engine.open) for engine in two.engines] == [2, 2]
        two.engines[1].step()
        two.kill(1)
        assert two.replicas.ready and len(two.engines[0].open) == 4
        two.restart(1)
        assert len(two.engines[1].open) == 0, "what goes on elsewhere stays there"
        two.submit(1)
        assert len(two.engines[1].open) == 1
        for _ in range(40):
            two.engines[0].step()
        assert all(sink.ids == list(range(100, 140)) for sink in sinks)

    asyncio.run(run())


def test_engines_that_need_each_other_are_lost_and_come_back_together() -> None:
    async def run() -> None:
        two = Set(2)
        sinks = [sink for _ in range(4) for sink in two.submit(1)]
        for _ in range(SUSPECT):
            for engine in two.engines:
                engine.step()
            guilty = list(two.engines[1].open)
            assert not two.replicas.lose({0: (), 1: guilty}, DEAD)
            assert all(engine.is_lost for engine in two.replicas.engines)
            two.engines = [two._engine(), two._engine()]
            two.replicas.join(dict(enumerate(two.engines)))
            placed = [len(engine.open) for engine in two.engines]
        assert placed == [1, 2], "of the two that ran on engine 1 at both deaths one runs alone, and one waits"
        while not all(sink.reason for sink in sinks):
            for engine in two.engines:
                engine.step()
        assert all(sink.ids == list(range(100, 140)) for sink in sinks)

    asyncio.run(run())


def test_while_no_engine_is_there_requests_wait_and_can_be_aborted() -> None:
    async def run() -> None:
        one = Set()
        one.kill()
        one.submit(2)
        one.replicas.abort([1])
        one.restart()
        assert [request.id for request in one.engines[0].submitted] == [2]

    asyncio.run(run())


def test_what_comes_while_the_engine_is_silent_is_sent_to_it() -> None:
    """It may only be slow, and nobody says when it goes on."""

    async def run() -> None:
        one = Set()
        engine = one.engines[0]
        engine.ready, sent = False, []
        engine.submit_many = sent.extend  # type: ignore[method-assign,assignment]
        one.submit(2)
        assert len(sent) == 2

    asyncio.run(run())


def test_late_outputs_of_a_replaced_engine_reach_nobody() -> None:
    """The client drops them because the request has another id by then."""

    async def run() -> None:
        one = Set()
        one.submit(1)
        (before,) = one.engines[0].open
        one.kill()
        one.restart()
        assert list(one.engines[0].open) != [before]

    asyncio.run(run())


def test_the_request_that_kills_again_and_again_ends_and_all_others_finish() -> None:
    async def run() -> None:
        one = Set()
        sinks = one.submit(4)
        for _ in range(2):
            one.kill()
            one.restart()
        killer = 2
        trials = []
        while sinks[killer].reason is None:
            (alone,) = one.engines[0].open.values()
            trials.append(alone.sink.__self__.id)  # type: ignore[attr-defined]
            if trials[-1] == killer + 1:
                one.kill()
                assert sinks[killer].reason is FinishReason.ERROR
                one.restart()
            else:
                for _ in range(CLEARED):
                    one.engines[0].step()
        assert trials == [4, 3], "the newest first"
        error = sinks[killer].outputs[-1].error
        assert error == "this request has ended the engine 3 times, alone at the last: it died"
        assert len(one.engines[0].open) == 3, "the others are no longer suspected"
        for _ in range(40):
            one.engines[0].step()
        assert [sink.ids for sink in sinks] == [list(range(100, 140))] * 2 + [[]] + [list(range(100, 140))]
        assert one.replicas.num_finished == 3

    asyncio.run(run())


def test_progress_clears_of_suspicion_and_so_does_not_being_computed() -> None:
    async def run() -> None:
        one = Set()
        sinks = one.submit(3, max_tokens=60)
        for _ in range(5):  # each time after some progress
            one.kill()
            one.restart()
            assert len(one.engines[0].open) == 3
            for _ in range(CLEARED):
                one.engines[0].step()
        for _ in range(5):  # between two steps
            one.kill(under_way=[])
            one.restart()
            assert len(one.engines[0].open) == 3
        assert all(sink.ids == list(range(100, 100 + 5 * CLEARED)) for sink in sinks)

    asyncio.run(run())


def test_a_suspect_that_leaves_makes_room_for_the_next() -> None:
    async def run() -> None:
        one = Set()
        one.submit(3)
        for _ in range(2):
            one.kill()
            one.restart()
        one.submit(1)
        assert len(one.engines[0].open) == 1, "a new request waits as well"
        one.replicas.abort([1])
        assert len(one.engines[0].open) == 1
        one.replicas.abort([2, 3])
        assert len(one.engines[0].open) == 1 and one.engines[0].submitted[-1].output_ids == []
        one.submit(1)
        assert len(one.engines[0].open) == 2

    asyncio.run(run())


def test_suspects_run_on_one_engine_while_others_go_on_at_the_other() -> None:
    async def run() -> None:
        two = Set(2)
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


def test_when_no_engine_will_come_all_ends_with_the_cause() -> None:
    async def run() -> None:
        one = Set()
        (sink,) = one.submit(1)
        one.engines[0].step()
        one.kill()
        one.replicas.give_up(DEAD)
        assert sink.reason is FinishReason.ERROR and sink.outputs[-1].error == "it died"
        with pytest.raises(EngineDead, match="it died"):
            one.submit(1)

    asyncio.run(run())


def test_counters_do_not_go_back() -> None:
    async def run() -> None:
        one = Set()
        one.engines[0].stats = Stats(2, 1, 0.5, 100, 40, 5, 9, 7)
        one.kill()
        assert one.replicas.engines[0].stats == Stats(0, 0, 0.0, 100, 40, 5, 9, 0)
        one.restart()
        one.engines[0].stats = Stats(1, 0, 0.25, 10, 4, 1, 2, 3)
        assert one.replicas.engines[0].stats == Stats(1, 0, 0.25, 110, 44, 6, 11, 3)

    asyncio.run(run())


def test_the_engines_facts_are_those_of_the_newest_process() -> None:
    async def run() -> None:
        one = Set()
        one.kill()
        replaced = ScriptedEngine(lambda request: [5], model_facts=facts(num_kv_blocks=77))
        one.replicas.join({0: replaced})
        assert one.replicas.facts.num_kv_blocks == 77

    asyncio.run(run())


def test_a_stream_goes_on_in_text_and_usage(serve: Serve) -> None:
    """With a stop string that is half received, and several choices."""
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
                    replicas = served.gate._replicas
                    replicas.lose({0: list(engine.open)}, DEAD)
                    engine = ScriptedEngine(engine.script, automatic=False)
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
