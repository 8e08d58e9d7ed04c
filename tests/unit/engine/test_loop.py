"""The loop and the wire without a model: a scripted executor, an in-memory channel."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import msgspec
import pytest

from serve_llm.common import messages
from serve_llm.common.types import LOWEST_PRIORITY, EngineCoreRequest, EPLBStats, FinishReason, Sampling
from serve_llm.engine.distributed.executor import Executor
from serve_llm.engine.loop import PAUSE_SECONDS, WAITS_BEFORE_IDLE_WORK, EngineCore, run
from serve_llm.engine.scheduler.output import RunnerOutput
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.worker.kv_cache import KVCacheConfig
from support.config import CONFIG


class CountingExecutor(Executor):
    """Every sampled id is the number of the step. Results come only when asked for, `depth` steps later."""

    kv_cache_config = KVCacheConfig((KVCacheSpec(8, None),), block_bytes=64, num_blocks=32)

    def __init__(self, depth: int, fail_at: int | None = None) -> None:
        self.depth = depth
        self.fail_at = fail_at
        self.steps = 0
        self.captured: list[int] = []

    def check(self) -> None:
        pass

    def execute(self, batch, masks=None):
        self.steps += 1
        if batch.capture_size:
            self.captured.append(batch.capture_size)
        future: Future = Future()
        if self.steps == self.fail_at:
            future.set_exception(RuntimeError("worker broke"))
        else:
            future.set_result(
                [RunnerOutput(token_id=self.steps if chunk.sample else None) for chunk in batch.scheduled]
            )
        return future

    def close(self) -> None: ...


class ScriptedChannel:
    """Returns one list of messages per receive, then Shutdown once there is no work and it has been waited for `quiet`
    times."""

    def __init__(self, script: list[list[messages.ToEngine]], quiet: int = 0) -> None:
        self.script = script
        self.quiet = quiet
        self.sent: list[messages.EngineCoreOutputs] = []

    def receive(self, seconds):
        if self.script:
            return self.script.pop(0)
        if seconds == 0:
            return []
        self.quiet -= 1
        return [] if self.quiet >= 0 else [messages.Shutdown()]

    def send(self, step) -> None:
        self.sent.append(messages.decode_from_engine(messages.encode(step)))


def request(number: int, max_tokens: int) -> EngineCoreRequest:
    return EngineCoreRequest(id=number, prompt_ids=[1] * 20, sampling=Sampling(max_tokens=max_tokens, seed=0))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_run_to_their_end_and_an_aborted_one_is_silent(depth: int) -> None:
    script = [[messages.Submit([request(1, 5), request(2, 50)])], [], [], [], [], [messages.Abort([2])]]
    channel = ScriptedChannel(script)
    run(EngineCore(CONFIG, CountingExecutor(depth)), channel)
    outputs = [output for step in channel.sent for output in step.outputs]
    assert sum(len(output.token_ids) for output in outputs if output.id == 1) == 5
    assert [output.finish_reason for output in outputs if output.id == 1][-1] is FinishReason.LENGTH
    assert all(output.finish_reason is None for output in outputs if output.id == 2)
    last = channel.sent[-1].stats
    assert (last.num_running, last.num_waiting, last.kv_cache_usage) == (0, 0, 0.0)


def test_a_malformed_request_ends_with_an_error() -> None:
    channel = ScriptedChannel([[messages.Submit([request(1, 2)]), messages.MalformedRequest(2, "Expected `int`")]])
    run(EngineCore(CONFIG, CountingExecutor(1)), channel)
    outputs = [output for step in channel.sent for output in step.outputs]
    (refused,) = [output for output in outputs if output.id == 2]
    assert refused.finish_reason is FinishReason.ERROR and "Expected `int`" in str(refused.error)
    assert [output.finish_reason for output in outputs if output.id == 1][-1] is FinishReason.LENGTH


def test_a_request_that_ends_the_engine_on_arrival_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[list[int]] = []
    core = EngineCore(CONFIG, CountingExecutor(1), report_in_flight=lambda ids: shown.append([*ids]))
    core.add_requests([request(6, 5)])
    assert shown[-1] == []

    def fail(*_: object) -> None:
        raise RuntimeError("cannot schedule")

    monkeypatch.setattr(core.scheduler, "add", fail)
    with pytest.raises(RuntimeError):
        core.add_requests([request(7, 5)])
    assert shown[-1] == [7]


def test_an_abort_of_the_only_request_is_followed_by_a_step_with_gauges_at_zero() -> None:
    channel = ScriptedChannel([[messages.Submit([request(1, 40)])], [], [messages.Abort([1])]])
    run(EngineCore(CONFIG, CountingExecutor(1)), channel)
    assert channel.sent[-1].outputs == []
    assert channel.sent[-1].stats.num_running == 0 and channel.sent[-1].stats.kv_cache_usage == 0.0


class PlacingExecutor(CountingExecutor):
    """Runs two steps for another engine, and moves experts before the second."""

    placed: EPLBStats | None = None

    @property
    def eplb_stats(self) -> EPLBStats | None:
        return self.placed

    def must_step(self) -> bool:
        return self.steps < 2

    def execute(self, batch, masks=None):
        if self.steps == 1:
            self.placed = EPLBStats(1, 2, 3)
        return super().execute(batch, masks)


def test_an_engine_without_requests_reports_that_it_has_placed_experts() -> None:
    channel = ScriptedChannel([])
    executor = PlacingExecutor(1)
    run(EngineCore(CONFIG, executor), channel)
    assert executor.steps == 2
    assert [step.stats.eplb for step in channel.sent] == [EPLBStats(1, 2, 3)]


def test_a_workers_exception_ends_the_loop() -> None:
    channel = ScriptedChannel([[messages.Submit([request(1, 5)])]])
    with pytest.raises(RuntimeError, match="worker broke"):
        run(EngineCore(CONFIG, CountingExecutor(1, fail_at=2)), channel)


def test_what_is_computed_is_shown_before_each_step_and_stays_when_a_step_fails() -> None:
    shown: list[list[int]] = []
    executor = CountingExecutor(1, fail_at=3)
    execute = executor.execute

    def checked(batch, masks):
        assert shown[-1] == [7, 8]
        return execute(batch, masks)

    executor.execute = checked
    channel = ScriptedChannel(
        [[messages.Submit([request(7, 5), EngineCoreRequest(id=8, prompt_ids=[2], sampling=request(8, 5).sampling)])]]
    )
    with pytest.raises(RuntimeError, match="worker broke"):
        run(
            EngineCore(
                replace(CONFIG, max_num_batched_tokens=64), executor, report_in_flight=lambda ids: shown.append([*ids])
            ),
            channel,
        )
    arrival = [[7, 8], []]
    assert shown == [*arrival, [7, 8], [], [7, 8], [], [7, 8]]


def test_messages_survive_the_wire() -> None:
    sampling = Sampling(max_tokens=3, seed=2**64 - 1, logit_bias={5: -1.5}, bad_words_ids=((1, 2), (3,)), logprobs=2)
    message = messages.Submit(
        [EngineCoreRequest(id=9, prompt_ids=[1, 2], output_ids=[3], sampling=sampling, cache_salt="\u00e9")]
    )
    assert messages.decode_to_engine(messages.encode(message)) == message


@pytest.mark.parametrize(
    ("fields", "captured"),
    [
        ({}, [1, 2, 4, 5]),
        ({"enforce_eager": True}, []),
        ({"device": "cpu"}, []),
        ({"pipeline_parallel_size": 2}, []),
        ({"generates": False}, []),
    ],
)
def test_an_idle_gpu_captures_the_sizes_of_decode_steps(fields: dict[str, object], captured: list[int]) -> None:
    executor = CountingExecutor(depth=1)
    config = replace(CONFIG, **{"device": "cuda", "enforce_eager": False, "max_num_seqs": 5} | fields)
    channel = ScriptedChannel([], quiet=WAITS_BEFORE_IDLE_WORK + 6)
    run(EngineCore(config, executor), channel)
    assert executor.captured == captured and not channel.sent


def test_captures_begin_only_after_a_while_without_requests() -> None:
    executor = CountingExecutor(depth=1)
    config = replace(CONFIG, device="cuda", enforce_eager=False, max_num_seqs=5)
    waits: list[list[messages.ToEngine]] = [[]] * (WAITS_BEFORE_IDLE_WORK - 2)
    channel = ScriptedChannel([*waits, [messages.Abort([1])], *waits], quiet=1)
    run(EngineCore(config, executor), channel)
    assert executor.captured == []


def test_requests_come_before_captures() -> None:
    executor = CountingExecutor(depth=1)
    config = replace(CONFIG, device="cuda", enforce_eager=False, max_num_seqs=2)
    request = EngineCoreRequest(id=0, prompt_ids=[1, 2], sampling=Sampling(max_tokens=2, seed=0))
    channel = ScriptedChannel([[messages.Submit([request])]], quiet=WAITS_BEFORE_IDLE_WORK + 2)
    run(EngineCore(config, executor), channel)
    assert executor.captured == [1, 2] and executor.steps == 4 and len(channel.sent) >= 2


class TimedExecutor(CountingExecutor):
    """Steps take 10 ms, and longer above 40 tokens: each token takes 0.25 ms."""

    def __init__(self) -> None:
        super().__init__(1)
        self.now = 0.0
        self.num_tokens = 0  # in the newest step

    def execute(self, batch, masks=None):
        self.num_tokens = batch.num_tokens
        self.now += max(0.010, batch.num_tokens / 4000)
        return super().execute(batch, masks)


def test_steps_of_batches_are_short_until_no_other_request_is_expected() -> None:
    executor = TimedExecutor()
    config = replace(CONFIG, max_num_batched_tokens=256, enable_prefix_caching=False)
    core = EngineCore(config, executor, clock=lambda: executor.now)
    core.add_requests([request(number, 5) for number in range(4)])
    while core.has_work:
        core.step()
    lines = [msgspec.structs.replace(request(number, 5), priority=LOWEST_PRIORITY) for number in range(4, 8)]
    core.add_requests(lines)
    core.step()
    assert executor.num_tokens == 40, "a step lasts as long as a decode step of the others"
    executor.now += PAUSE_SECONDS
    core.step()
    assert executor.num_tokens == 42, "two prompts, and a token of each of the others"
