"""The study in docs/simulation.md: a fleet and a tenth of it, with even and bursty arrivals and with lost nodes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bench.simulation.costs import GPU_8B
from bench.simulation.engine import EngineShape
from bench.simulation.fleet import FleetShape, FleetSimulator, NodeLoss
from bench.simulation.report import FleetReport, LossCosts
from bench.simulation.traces import Lengths, Mix, bursty_times, generate_trace, poisson_times

ENGINE = EngineShape(num_blocks=8192, max_model_len=32768)  # 131,072 tokens of KV cache
STREAMS_PER_REPLICA = 100
RATE_PER_REPLICA = 24.0  # requests per second
MIX = Mix(
    prompt=Lengths(median=200, sigma=0.8, least=16, most=2000),
    output=Lengths(median=100, sigma=0.6, least=8, most=500),
    num_prefixes=256,
    prefix_tokens=1000,
    mean_turns=2,
    think_seconds=2.0,
)


@dataclass(frozen=True)
class Scenario:
    name: str  # as in a fleet of 1,000 replicas
    share: float  # shares of the fleet's replicas
    is_bursty: bool
    lost_nodes: int = 0


SCENARIOS = (
    Scenario("100 replicas, even arrivals", 0.1, is_bursty=False),
    Scenario("100, bursts", 0.1, is_bursty=True),
    Scenario("100, bursts, a lost node", 0.1, is_bursty=True, lost_nodes=1),
    Scenario("1,000, bursts, 4 lost nodes", 1.0, is_bursty=True, lost_nodes=4),
)


def simulate_scenario(scenario: Scenario, num_replicas: int, seed: int) -> FleetReport:
    """Simulate one scenario. num_replicas: of the whole fleet. Nodes of 8 replicas are lost after 2 s, one every half
    second, for 20 s."""
    size = max(1, round(num_replicas * scenario.share))
    rng = random.Random(seed)
    rate = RATE_PER_REPLICA * size / MIX.mean_turns
    times: Iterator[float] = poisson_times(rng, rate)
    if scenario.is_bursty:
        times = bursty_times(rng, rate, factor=4.0, share=0.1, seconds=1.0)
    trace = generate_trace(rng, times, STREAMS_PER_REPLICA * size, MIX)
    losses = [NodeLoss(at=2.0 + 0.5 * node, node=node, down_seconds=20.0) for node in range(scenario.lost_nodes)]
    # The queue grows with the fleet, so that bursts wait instead of being refused.
    shape = FleetShape(size, ENGINE, max_queue=(2048 * size, 4_000_000 * size))
    return FleetSimulator(shape, GPU_8B, trace, losses).run()


def _read_losses(losses: LossCosts, text: str) -> str:
    return text if losses.delayed_requests else "-"


ROWS: dict[str, Callable[[FleetReport], str]] = {
    "requests": lambda one: f"{one.finished:,}",
    "open at a time, at most": lambda one: f"{one.most_open:,}",
    "output tokens/s": lambda one: f"{one.output_tokens_per_second:,.0f}",
    "first token p50, p99, ms": lambda one: f"{1e3 * one.latencies.ttft_p50:.0f}, {1e3 * one.latencies.ttft_p99:,.0f}",
    "between tokens p50, p99, ms": lambda one: f"{1e3 * one.latencies.itl_p50:.1f}, {1e3 * one.latencies.itl_p99:.1f}",
    "latency p50, p99, s": lambda one: f"{one.latencies.latency_p50:.2f}, {one.latencies.latency_p99:.2f}",
    "prompt tokens found in caches": lambda one: f"{one.hit_rate:.1%}",
    "requests on the busiest replica": lambda one: f"{one.largest_share:.2%}",
    "preemptions": lambda one: f"{one.preemptions:,}",
    "requests delayed by losses": lambda one: _read_losses(one.losses, f"{one.losses.delayed_requests:,}"),
    "their delay p50, p99, s": lambda one: _read_losses(
        one.losses, f"{one.losses.delay_p50:.2f}, {one.losses.delay_p99:.2f}"
    ),
    "their tokens": lambda one: _read_losses(one.losses, f"{one.losses.replayed_tokens:,}"),
    "of these, computed again": lambda one: _read_losses(one.losses, f"{one.losses.recomputed_tokens:,}"),
    "events simulated": lambda one: f"{one.events:,}",
    "steps": lambda one: f"{one.steps:,}",
    "wall time, s": lambda one: f"{one.wall_seconds:.0f}",
    "events/s": lambda one: f"{one.events_per_second:,.0f}",
}


def format_study(reports: Mapping[str, FleetReport]) -> str:
    """Format a table with one column per scenario. reports: by scenario name."""
    lines = [f"| | {' | '.join(reports)} |", "|---" * (len(reports) + 1) + "|"]
    for heading, read in ROWS.items():
        lines.append(f"| {heading} | {' | '.join(map(read, reports.values()))} |")
    return "\n".join(lines)
