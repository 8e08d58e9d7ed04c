"""The loop and the wire without a model: a scripted executor, an in-memory channel."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from serve_llm.engine import wire
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.loop import Engine, run
from serve_llm.engine.schedule.batch import ChunkResult
from serve_llm.engine.schedule.sequence import GroupLayout
from serve_llm.engine.types import FinishReason, Request, Sampling
from support.config import CONFIG


class CountingExecutor:
    """Every sampled id is the number of the step. Results come only when asked for, `depth` steps later."""

    layout = CacheLayout((GroupLayout(8, None),), block_bytes=64, num_blocks=32)

    def __init__(self, depth: int, fail_at: int | None = None) -> None:
        self.depth = depth
        self.fail_at = fail_at
        self.steps = 0

    def check(self) -> None:
        pass

    def execute(self, batch):
        self.steps += 1
        future: Future = Future()
        if self.steps == self.fail_at:
            future.set_exception(RuntimeError("worker broke"))
        else:
            future.set_result([ChunkResult(token_id=self.steps if chunk.sample else None) for chunk in batch.chunks])
        return future

    def close(self) -> None: ...


class ScriptedChannel:
    """Hands out one list of messages per receive, then Shutdown once nothing is left to do."""

    def __init__(self, script: list[list[wire.ToEngine]]) -> None:
        self.script = script
        self.sent: list[wire.Step] = []

    def receive(self, seconds):
        if self.script:
            return self.script.pop(0)
        return [] if seconds == 0 else [wire.Shutdown()]

    def send(self, step) -> None:
        self.sent.append(wire.decode_from_engine(wire.encode(step)))


def request(number: int, max_tokens: int) -> Request:
    return Request(id=number, prompt_ids=[1] * 20, sampling=Sampling(max_tokens=max_tokens, seed=0))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_run_to_their_end_and_an_aborted_one_is_silent(depth: int) -> None:
    script = [[wire.Submit([request(1, 5), request(2, 50)])], [], [], [], [], [wire.Abort([2])]]
    channel = ScriptedChannel(script)
    run(Engine(CONFIG, CountingExecutor(depth)), channel)
    outputs = [output for step in channel.sent for output in step.outputs]
    assert sum(len(output.token_ids) for output in outputs if output.id == 1) == 5
    assert [output.finish_reason for output in outputs if output.id == 1][-1] is FinishReason.LENGTH
    assert all(output.finish_reason is None for output in outputs if output.id == 2)
    last = channel.sent[-1].stats
    assert (last.num_running, last.num_waiting, last.kv_cache_usage) == (0, 0, 0.0)


def test_an_abort_of_the_only_request_is_followed_by_a_step_with_gauges_at_zero() -> None:
    channel = ScriptedChannel([[wire.Submit([request(1, 40)])], [], [wire.Abort([1])]])
    run(Engine(CONFIG, CountingExecutor(1)), channel)
    assert channel.sent[-1].outputs == []
    assert channel.sent[-1].stats.num_running == 0 and channel.sent[-1].stats.kv_cache_usage == 0.0


def test_a_workers_exception_ends_the_loop() -> None:
    channel = ScriptedChannel([[wire.Submit([request(1, 5)])]])
    with pytest.raises(RuntimeError, match="worker broke"):
        run(Engine(CONFIG, CountingExecutor(1, fail_at=2)), channel)


def test_what_is_computed_is_shown_before_each_step_and_stays_when_a_step_fails() -> None:
    shown: list[list[int]] = []
    executor = CountingExecutor(1, fail_at=3)
    execute = executor.execute

    def checked(batch):
        assert shown[-1] == [7, 8]
        return execute(batch)

    executor.execute = checked
    channel = ScriptedChannel(
        [[wire.Submit([request(7, 5), Request(id=8, prompt_ids=[2], sampling=request(8, 5).sampling)])]]
    )
    with pytest.raises(RuntimeError, match="worker broke"):
        run(
            Engine(replace(CONFIG, max_num_batched_tokens=64), executor, show=lambda ids: shown.append([*ids])), channel
        )
    assert shown == [[7, 8], [], [7, 8], [], [7, 8]]


def test_messages_survive_the_wire() -> None:
    sampling = Sampling(max_tokens=3, seed=2**64 - 1, logit_bias={5: -1.5}, bad_words_ids=((1, 2), (3,)), logprobs=2)
    message = wire.Submit([Request(id=9, prompt_ids=[1, 2], output_ids=[3], sampling=sampling, cache_salt="\u00e9")])
    assert wire.decode_to_engine(wire.encode(message)) == message
