"""Compare the simulation with a real daemon on the same traces."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Iterator

import msgspec

from bench.load import model_name
from bench.servers import SERVE_LLM, Recipe, free_port, running
from bench.simulation.costs import StepCosts
from bench.simulation.daemon import DaemonClient, MeasuredRun
from bench.simulation.engine import EngineShape
from bench.simulation.fleet import FleetShape, FleetSimulator
from bench.simulation.report import FleetReport, Latencies
from bench.simulation.traces import Lengths, Mix, TraceRequest, bursty_times, generate_trace, poisson_times
from serve_llm.engine.scheduler.policy import CPU_STEP_SECONDS

SHAPE = EngineShape(
    num_blocks=4096,  # more than the traces fill, as in the daemon
    max_num_seqs=32,
    max_model_len=1024,
    max_num_batched_tokens=512,
    async_scheduling=False,
    target_step_seconds=CPU_STEP_SECONDS,
)
OPTIONS = (
    *("--max-num-seqs", str(SHAPE.max_num_seqs)),
    *("--max-model-len", str(SHAPE.max_model_len)),
    *("--max-num-batched-tokens", str(SHAPE.max_num_batched_tokens)),
    *("--cpu-threads", "1"),
)
MIX = Mix(
    prompt=Lengths(median=100, sigma=0.6, least=16, most=400),
    output=Lengths(median=40, sigma=0.5, least=8, most=120),
)
TURNS = Mix(
    prompt=Lengths(median=40, sigma=0.5, least=16, most=100),
    output=Lengths(median=30, sigma=0.4, least=8, most=60),
    num_prefixes=3,
    prefix_tokens=160,
    mean_turns=3,
    think_seconds=0.5,
)


def make_traces(seed: int) -> dict[str, list[TraceRequest]]:
    """Make traces that are light enough for a small machine, except for the last, which measures throughput."""

    def build(number: int, mix: Mix, make_times: Callable[[random.Random], Iterator[float]]) -> list[TraceRequest]:
        rng = random.Random(seed)
        return generate_trace(rng, make_times(rng), number, mix)

    def burst(rng: random.Random) -> Iterator[float]:
        return bursty_times(rng, 4.0, factor=5.0, share=0.15, seconds=1.5)

    single = build(48, MIX, lambda rng: poisson_times(rng, 4.0))
    return {
        "poisson": single,
        "bursty": build(48, MIX, burst),
        "multi-turn": _cut_conversations(build(48, TURNS, lambda rng: poisson_times(rng, 1.5))),
        "all at once": [msgspec.structs.replace(one, at=0.0) for one in single],
    }


def _cut_conversations(trace: list[TraceRequest]) -> list[TraceRequest]:
    """Drop the turns that do not fit into the model's context."""
    said: dict[int | None, int] = {}
    kept = []
    for one in trace:
        total = said.get(one.conversation, 0) if one.conversation is not None else 0
        total += one.prefix_tokens + one.prompt_tokens + one.output_tokens
        if total <= SHAPE.max_model_len:
            kept.append(one)
            said[one.conversation] = total
    return kept


class Comparison(msgspec.Struct, frozen=True):
    """A trace, measured, and simulated with the costs measured just before."""

    trace: str
    costs: StepCosts
    measured: MeasuredRun
    simulated: FleetReport


def simulate_trace(trace: list[TraceRequest], costs: StepCosts) -> FleetReport:
    return FleetSimulator(FleetShape(1, SHAPE), costs, trace).run()


def compare(url: str, rounds: int) -> Iterator[Comparison]:
    """Run every trace `rounds` times, in turns. Calibrates before and after each: a shared machine's speed changes."""
    model = model_name(url)
    for number in range(rounds):
        for place, (name, trace) in enumerate(make_traces(number).items()):
            client = DaemonClient(url, model, seed=100 * number + place)
            before = asyncio.run(client.calibrate())
            measured = asyncio.run(client.replay(trace))
            costs = before.fit(asyncio.run(client.calibrate()))
            yield Comparison(name, costs, measured, simulate_trace(trace, costs))


def validate(model: str, rounds: int) -> Iterator[Comparison]:
    """Start a daemon and compare. Raises StartError."""
    port = free_port()
    command = (SERVE_LLM, model, "--port", str(port), *OPTIONS)
    with running(Recipe("serve-llm", f"http://127.0.0.1:{port}", command)) as server:
        yield from compare(server.url, rounds)


QUANTITIES: dict[str, tuple[float, Callable[[float, Latencies], float]]] = {
    # name: (factor, value of throughput and latencies)
    "output tokens/s": (1.0, lambda throughput, one: throughput),
    "first token p50, ms": (1e3, lambda throughput, one: one.ttft_p50),
    "first token p99, ms": (1e3, lambda throughput, one: one.ttft_p99),
    "between tokens p50, ms": (1e3, lambda throughput, one: one.itl_p50),
    "latency p50, s": (1.0, lambda throughput, one: one.latency_p50),
    "latency p99, s": (1.0, lambda throughput, one: one.latency_p99),
}


def format_comparisons(found: list[Comparison]) -> str:
    """Format a table: medians of the rounds, and of the ratios of simulated to measured values with their range."""
    lines = ["| trace | quantity | measured | simulated | ratio (least to most) |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(one.trace for one in found):
        rounds = [one for one in found if one.trace == name]
        for quantity, (factor, read) in QUANTITIES.items():
            measured = [factor * read(o.measured.output_tokens_per_second, o.measured.latencies) for o in rounds]
            simulated = [factor * read(o.simulated.output_tokens_per_second, o.simulated.latencies) for o in rounds]
            ratios = [b / a for a, b in zip(measured, simulated, strict=True)]
            lines.append(
                f"| {name} | {quantity} | {statistics.median(measured):.4g} | {statistics.median(simulated):.4g} "
                f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
            )
    return "\n".join(lines)
