"""Calibration of the simulation, its comparison with a (fake) daemon, and the programs around it."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from bench.simulate import build_parser
from bench.simulation.costs import StepCosts, StepWork
from bench.simulation.daemon import Calibration, DaemonClient, MeasuredRun
from bench.simulation.engine import REPLY_ID
from bench.simulation.report import Latencies
from bench.simulation.study import ROWS, SCENARIOS, Scenario, format_study, simulate_scenario
from bench.simulation.traces import TraceRequest, check_lengths
from bench.simulation.validation import SHAPE, Comparison, format_comparisons, make_traces, simulate_trace
from serve_llm.cli.bench.client import StreamUsage, TimedReply

COSTS = StepCosts(
    step_seconds=0.002,
    prompt_token_seconds=0.0001,
    sequence_seconds=0.0005,
    context_token_seconds=0.000_001,
    request_seconds=0.004,
)


class PlayedDaemon(DaemonClient):
    """Replies at once, as if the first token took one second and each other token a tenth."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1", None, seed=0)
        self.asked: list[tuple[list[int], int]] = []

    async def complete(self, prompt_ids: Sequence[int], output_tokens: int) -> TimedReply:
        self.asked.append((list(prompt_ids), output_tokens))
        times = [1.0 + 0.1 * number for number in range(output_tokens)]
        return TimedReply(0.0, times[-1], times, StreamUsage(len(prompt_ids), output_tokens))


def test_a_replay_continues_conversations_with_their_replies() -> None:
    trace = [
        TraceRequest(at=0.0, prompt_tokens=20, output_tokens=3, conversation=4),
        TraceRequest(at=0.0, prompt_tokens=30, output_tokens=6),
        TraceRequest(at=0.0, prompt_tokens=10, output_tokens=2, conversation=4),
    ]
    daemon = PlayedDaemon()
    measured = asyncio.run(daemon.replay(trace))
    by_length = {len(prompt): prompt for prompt, _ in daemon.asked}
    assert sorted(by_length) == [20, 30, 33]
    assert by_length[33][:23] == by_length[20] + [REPLY_ID] * 3
    assert measured.output_tokens == 11
    assert measured.output_tokens_per_second == pytest.approx(11 / 1.5)
    assert measured.latencies.ttft_p50 == 1.0
    assert measured.latencies.latency_p50 == pytest.approx(1.2)


def test_costs_are_those_of_the_daemon_that_was_measured() -> None:
    works = [StepWork(0, streams, context) for streams, context in ((1, 50), (2, 90), (4, 200), (8, 390), (1, 900))]
    steps = [(work, COSTS.seconds(work)) for work in works]
    prompts = [(n, COSTS.request_seconds + COSTS.seconds(StepWork(n, 0, n))) for n in (16, 100, 400)]
    fitted = Calibration(steps, prompts).fit(Calibration(steps, prompts))
    assert msgspec.structs.astuple(fitted) == pytest.approx(msgspec.structs.astuple(COSTS))


def test_the_traces_fit_the_daemon_and_the_comparison_has_every_quantity() -> None:
    found = []
    for name, trace in make_traces(0).items():
        check_lengths(trace, SHAPE.max_model_len)
        assert len(trace) > 30
        report = simulate_trace(trace, COSTS)
        assert report.finished == len(trace)
        measured = MeasuredRun(report.output_tokens, report.output_tokens_per_second / 2, report.latencies)
        found.append(Comparison(name, COSTS, measured, report))
    table = format_comparisons(found).splitlines()
    assert len(table) == 2 + 6 * 4
    assert table[2].endswith("| 2.00 (2.00 to 2.00) |") and "poisson | output tokens/s" in table[2]
    assert table[3].endswith("| 1.00 (1.00 to 1.00) |")
    assert isinstance(found[0].measured.latencies, Latencies)


@pytest.mark.slow
def test_the_study_runs_on_a_small_fleet() -> None:
    reports = {}
    for scenario in (SCENARIOS[0], SCENARIOS[2]):
        small = Scenario(scenario.name, 1.0, scenario.is_bursty, scenario.lost_nodes)
        report = simulate_scenario(small, 9, seed=0)
        assert report.finished == 900 and report.refused == 0
        assert (report.losses.delayed_requests > 0) == (scenario.lost_nodes > 0)
        reports[scenario.name] = report
    table = format_study(reports).splitlines()
    assert len(table) == len(ROWS) + 2 and {line.count("|") for line in table} == {4}


def call(*arguments: object) -> None:
    given = build_parser().parse_args([str(one) for one in arguments])
    given.call(given)
    assert gc.isenabled(), "the tests that run after this one need the collector"


def test_a_generated_trace_gives_the_result_of_its_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, costs = tmp_path / "trace.jsonl", tmp_path / "costs.json"
    costs.write_bytes(msgspec.json.encode(COSTS))
    shape = ("--requests", 60, "--rate", 30, "--mix", "prefixes", "--arrivals", "bursty")
    call("generate", path, *shape)
    assert len(path.read_text().splitlines()) == 60
    results = []
    for arguments in (("--trace", path), shape):
        capsys.readouterr()
        call("run", "--replicas", 2, "--replicas-per-node", 1, "--costs", costs, "--lose", "1@0.5+6", *arguments)
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        results.append({name: value for name, value in result.items() if not name.startswith(("wall", "events_"))})
    assert results[0] == results[1]
    assert results[0]["finished"] == 60 and results[0]["losses"]["lost_replicas"] == 1
