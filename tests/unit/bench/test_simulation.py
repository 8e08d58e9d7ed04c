"""The simulator: nothing is lost or counted twice, and its times match a schedule calculated by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from bench.simulate import MIXES, parse_loss
from bench.simulation.costs import GPU_8B, StepCosts, StepWork, fit_costs
from bench.simulation.engine import EngineShape
from bench.simulation.fleet import FleetShape, FleetSimulator, NodeLoss
from bench.simulation.report import FleetReport, GapHistogram, describe_report
from bench.simulation.traces import (
    Mix,
    PromptBuilder,
    TraceRequest,
    bursty_times,
    generate_trace,
    poisson_times,
    read_trace,
    write_trace,
)

# 1 s a step, 0.01 s a prompt token, 0.1 s a decoding sequence: easy to add up.
ROUND_COSTS = StepCosts(
    step_seconds=1.0, prompt_token_seconds=0.01, sequence_seconds=0.1, context_token_seconds=0.0, request_seconds=0.5
)
SMALL = EngineShape(num_blocks=512, max_num_seqs=8, max_num_batched_tokens=256, async_scheduling=False)


def make_trace(mix: Mix, number: int, rate: float = 40.0, seed: int = 0) -> list[TraceRequest]:
    rng = random.Random(seed)
    return generate_trace(rng, poisson_times(rng, rate), number, mix)


def small_mix(turns: float = 1.0) -> Mix:
    mix = MIXES["conversations"]
    lengths = replace(mix.prompt, median=60, most=200)
    return replace(
        mix,
        prompt=lengths,
        output=replace(lengths, median=20, most=60),
        num_prefixes=4,
        prefix_tokens=64,
        mean_turns=turns,
        think_seconds=0.5,
    )


def without_wall_time(report: FleetReport) -> FleetReport:
    return msgspec.structs.replace(report, wall_seconds=0.0, events_per_second=0.0)


def test_one_replica_follows_the_schedule_worked_out_by_hand() -> None:
    trace = [
        TraceRequest(at=0.0, prompt_tokens=100, output_tokens=3),
        TraceRequest(at=1.0, prompt_tokens=50, output_tokens=2),
    ]
    simulator = FleetSimulator(FleetShape(1, SMALL), ROUND_COSTS, trace)
    report = simulator.run()
    first, second = simulator.streams
    assert first is not None and second is not None
    # The first request reaches the engine at 0.5. Its prompt takes 1 + 100 * 0.01 s and ends at 2.5 with its first
    # token.
    assert first.first_token == pytest.approx(2.5)
    # Then its second token and the other prompt share one step: 1 + 50 * 0.01 + 0.1 s.
    assert second.first_token == pytest.approx(4.1)
    # The last tokens of both share one step: 1 + 2 * 0.1 s.
    assert first.last_token == second.last_token == pytest.approx(5.3)
    assert report.steps == 3 and report.output_tokens == 5
    assert report.seconds == pytest.approx(5.3)
    assert report.output_tokens_per_second == pytest.approx(5 / 5.3)
    assert report.latencies.ttft_p50 == pytest.approx((2.5 + 3.1) / 2)


def test_with_async_scheduling_steps_run_one_after_the_other() -> None:
    trace = [TraceRequest(at=0.0, prompt_tokens=100, output_tokens=4)]
    simulator = FleetSimulator(FleetShape(1, replace(SMALL, async_scheduling=True)), ROUND_COSTS, trace)
    simulator.run()
    (stream,) = simulator.streams
    assert stream is not None
    assert stream.first_token == pytest.approx(2.5)
    assert stream.last_token == pytest.approx(2.5 + 3 * 1.1)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    trace = [TraceRequest(at=0.0, prompt_tokens=600, output_tokens=1)]
    simulator = FleetSimulator(FleetShape(1, SMALL), ROUND_COSTS, trace)
    report = simulator.run()
    (stream,) = simulator.streams
    assert stream is not None
    assert report.steps == 3 and simulator.engines[0].prompt_tokens_computed == 600
    assert stream.last_token == pytest.approx(0.5 + 3 * 1.0 + 600 * 0.01)


@pytest.mark.parametrize("turns", [1.0, 3.0])
@pytest.mark.parametrize("losses", [(), (NodeLoss(0.7, 0, 1.5), NodeLoss(2.4, 1, 0.4), NodeLoss(3.0, 0, 2.0))])
def test_every_request_finishes_once_with_the_tokens_of_the_trace(turns: float, losses: tuple[NodeLoss, ...]) -> None:
    trace = make_trace(small_mix(turns), 300)
    shape = FleetShape(4, SMALL, replicas_per_node=2, detection_seconds=0.15)
    simulator = FleetSimulator(shape, GPU_8B, trace, losses)
    report = simulator.run()  # asserts that every stream ends once
    assert report.finished == len(trace) and report.refused == 0
    counted = [0 if stream is None else stream.num_tokens for stream in simulator.streams]
    assert counted == [one.output_tokens for one in trace]
    assert (report.losses.delayed_requests > 0) == bool(losses)
    for engine in simulator.engines:
        engine.scheduler.check_integrity()
        assert not engine.scheduler.has_work


def test_equal_arguments_give_equal_results() -> None:
    def run() -> FleetReport:
        trace = make_trace(small_mix(3.0), 200)
        return FleetSimulator(FleetShape(3, SMALL, detection_seconds=0.2), GPU_8B, trace, [NodeLoss(1.0, 0, 1.0)]).run()

    first = without_wall_time(run())
    assert msgspec.json.encode(first) == msgspec.json.encode(without_wall_time(run()))
    assert "delayed" in describe_report(first)


def test_while_all_replicas_are_lost_requests_wait_or_are_refused_and_none_is_forgotten() -> None:
    trace = make_trace(small_mix(), 100, rate=50)
    simulator = FleetSimulator(FleetShape(2, SMALL, detection_seconds=0.5), GPU_8B, trace, [NodeLoss(0.5, 0, 5.0)])
    report = simulator.run()
    assert report.refused > 0, "nobody is ready after the loss was noticed"
    assert report.finished + report.refused == 100
    assert report.losses.lost_replicas == 2 and report.losses.delay_p50 > 4.0
    assert simulator.admission.refused["not_ready"] == report.refused


def test_a_short_cache_preempts_and_still_finishes_all() -> None:
    shape = FleetShape(1, replace(SMALL, num_blocks=32, max_model_len=512))
    trace = [TraceRequest(at=0.0, prompt_tokens=100, output_tokens=100) for _ in range(8)]
    report = FleetSimulator(shape, GPU_8B, trace).run()
    assert report.preemptions > 0 and report.finished == 8
    assert report.output_tokens == 800


def test_a_full_queue_refuses() -> None:
    trace = [TraceRequest(at=0.0, prompt_tokens=100, output_tokens=10) for _ in range(30)]
    report = FleetSimulator(FleetShape(1, SMALL, max_queue=(20, 10_000)), GPU_8B, trace).run()
    assert report.refused == 10 and report.finished == 20


def test_turns_go_to_the_replica_that_has_their_prefix() -> None:
    trace = []
    for conversation in range(12):
        for turn in range(4):
            trace.append(
                TraceRequest(
                    at=0.01 * conversation + 5.0 * turn, prompt_tokens=160, output_tokens=32, conversation=conversation
                )
            )
    trace.sort(key=lambda one: one.at)
    simulator = FleetSimulator(FleetShape(4, SMALL), GPU_8B, trace)
    report = simulator.run()
    by_conversation: dict[int | None, set[int]] = {}
    for number, one in enumerate(trace):
        by_conversation.setdefault(one.conversation, set()).add(simulator.replicas_of[number])
    assert all(len(replicas) == 1 for replicas in by_conversation.values())
    assert len({index for replicas in by_conversation.values() for index in replicas}) == 4, "they are spread"
    # Turn k finds the earlier prompts and replies in whole blocks, except for the last token of the reply.
    said = [160 + 192 * turn for turn in range(4)]
    cached = [(192 * turn - 1) // 16 * 16 for turn in range(1, 4)]
    assert report.hit_rate == pytest.approx(sum(cached) / sum(said))


def test_a_turn_waits_for_the_reply_before_it() -> None:
    trace = [
        TraceRequest(at=0.0, prompt_tokens=20, output_tokens=5, conversation=7),
        TraceRequest(at=0.1, prompt_tokens=20, output_tokens=5, conversation=7),
    ]
    simulator = FleetSimulator(FleetShape(1, SMALL), ROUND_COSTS, trace)
    simulator.run()
    first, second = simulator.streams
    assert first is not None and second is not None
    assert second.began == first.last_token


def test_impossible_runs_are_refused() -> None:
    trace = [TraceRequest(at=0.0, prompt_tokens=20, output_tokens=5, conversation=1)] * 2
    with pytest.raises(ValueError, match="request 1 has 50 tokens with its history; the model takes 40"):
        FleetSimulator(FleetShape(1, replace(SMALL, max_model_len=40)), GPU_8B, trace)
    with pytest.raises(ValueError, match="there is no node 3"):
        FleetSimulator(FleetShape(1, SMALL), GPU_8B, trace, [NodeLoss(0.0, 3, 1.0)])
    with pytest.raises(ValueError, match="while it is gone"):
        FleetSimulator(FleetShape(1, SMALL), GPU_8B, trace, [NodeLoss(0.0, 0, 9.0), NodeLoss(6.0, 0, 1.0)])
    with pytest.raises(ValueError, match="must hold a sequence"):
        FleetShape(1, replace(SMALL, num_blocks=8))


def test_traces_are_written_and_read_again(tmp_path: Path) -> None:
    trace = make_trace(small_mix(3.0), 50)
    path = tmp_path / "trace.jsonl"
    write_trace(path, trace)
    assert read_trace(path) == trace
    path.write_text('{"at": 0, "output_tokens": 4, "prompt_ids": [5, 6]}\n\n')
    assert read_trace(path) == [TraceRequest(at=0, output_tokens=4, prompt_ids=[5, 6])]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"at": 0, "output_tokens": 4}', "needs `prompt_ids` or `prompt_tokens`"),
        ('{"at": 0, "output_tokens": 0, "prompt_tokens": 4}', "1 or more"),
        ('{"at": -1, "output_tokens": 4, "prompt_tokens": 4}', "0 or more"),
        ('{"at": 0, "output_tokens": 4, "prompt_tokens": 4, "prefix": 1}', "go together"),
        ('{"at": 0, "output_tokens": 4, "prompt_tokens": 4, "prompt_ids": [1]}', "either"),
        ('{"at": 0, "output_tokens": 4, "prompt_tokens": 4, "color": 1}', "unknown field"),
        ("", "has no requests"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match=why):
        read_trace(path)


def count_in(times: Iterator[float], seconds: float) -> int:
    return sum(1 for _ in iter(lambda: next(times) < seconds, False))


def test_arrivals_have_the_rate_and_bursts_are_uneven() -> None:
    assert count_in(poisson_times(random.Random(1), 10.0), 1000.0) == pytest.approx(10_000, rel=0.05)
    assert count_in(bursty_times(random.Random(1), 10.0), 50_000.0) == pytest.approx(500_000, rel=0.1)
    rng = random.Random(1)
    times = bursty_times(rng, 10.0)
    per_second = [0] * 1000
    while (at := next(times)) < 1000:
        per_second[int(at)] += 1
    assert max(per_second) > 60 and sorted(per_second)[500] < 6


def test_prompts_differ_from_the_first_ids_on_and_prefixes_are_shared() -> None:
    prompts = PromptBuilder(range(300, 316))
    texts = {tuple(prompts.own_text(number, 4)) for number in range(2000)}
    assert len(texts) == 2000
    assert len(prompts.own_text(3, 200_000)) == 200_000
    one = TraceRequest(at=0, output_tokens=1, prompt_tokens=8, prefix=3, prefix_tokens=24)
    a, b = (prompts.build(number, one, []) for number in (1, 2))
    assert a[:24] == b[:24] and a[24:] != b[24:] and len(a) == 32


def test_costs_are_fitted_to_the_steps_they_came_from() -> None:
    costs = msgspec.structs.replace(GPU_8B, request_seconds=0.0)
    rng = random.Random(0)
    works = [StepWork(rng.randrange(2000), rng.randrange(64), rng.randrange(100_000)) for _ in range(40)]
    fitted = fit_costs([(work, costs.seconds(work)) for work in works])
    assert msgspec.structs.astuple(fitted) == pytest.approx(msgspec.structs.astuple(costs), abs=1e-12)
    # A term that would be negative is omitted.
    noisy = [(work, 0.01 - 1e-9 * work.context_tokens) for work in works]
    assert fit_costs(noisy).context_token_seconds == 0.0
    with pytest.raises(ValueError, match="too much alike"):
        fit_costs([(StepWork(0, 1, 10), 0.1)] * 5)
    with pytest.raises(ValueError, match="must not be negative"):
        StepCosts(step_seconds=1.0, prompt_token_seconds=-1.0, sequence_seconds=0.0, context_token_seconds=0.0)


def test_percentiles_of_gaps_are_within_one_percent() -> None:
    gaps = GapHistogram()
    for number in range(1, 1001):
        gaps.add(number / 1000)
    assert gaps.percentile(0.5) == pytest.approx(0.5, rel=0.011)
    assert gaps.percentile(0.99) == pytest.approx(0.99, rel=0.011)


def test_losses_are_parsed() -> None:
    assert parse_loss("2@5+20.5") == NodeLoss(at=5.0, node=2, down_seconds=20.5)
