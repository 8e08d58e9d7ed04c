"""Simulate many engines behind one router: throughput, tail latency, routing and the cost of lost nodes.

Run: PYTHONPATH=tests python -m bench.simulate run --replicas 16 --requests 2000 --rate 60 --lose 0@5+20
     PYTHONPATH=tests python -m bench.simulate generate trace.jsonl --arrivals bursty --mix conversations
     PYTHONPATH=tests python -m bench.simulate run --trace trace.jsonl --costs costs.json

This is a discrete-event simulation. The scheduler with its blocks, prefix cache and preemption, the router, the replays
after a loss and admission control are the daemon's own code; only the clock and the step times are simulated.
Prints a table, then one JSON line. Equal arguments give equal results, except for the run time of the simulation.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import sys
from pathlib import Path

import msgspec

from bench.load import positive
from bench.servers import StartError, stop_on_signals
from bench.simulation.costs import GPU_8B, StepCosts
from bench.simulation.engine import EngineShape
from bench.simulation.fleet import FleetShape, FleetSimulator, NodeLoss
from bench.simulation.report import FleetReport, describe_report
from bench.simulation.study import SCENARIOS, format_study, simulate_scenario
from bench.simulation.traces import (
    Lengths,
    Mix,
    TraceRequest,
    bursty_times,
    generate_trace,
    poisson_times,
    read_trace,
    write_trace,
)
from bench.simulation.validation import format_comparisons, validate
from serve_llm.common.options.parsers import parse_queue

PROMPT = Lengths(median=200, sigma=0.8, least=16, most=2000)
OUTPUT = Lengths(median=100, sigma=0.6, least=8, most=500)
MIXES = {
    "single": Mix(Lengths(median=600, sigma=0.8, least=16, most=4000), OUTPUT),
    "prefixes": Mix(PROMPT, OUTPUT, num_prefixes=64, prefix_tokens=1000),
    "conversations": Mix(PROMPT, OUTPUT, num_prefixes=64, prefix_tokens=1000, mean_turns=4, think_seconds=10),
}
ARRIVALS = {"poisson": poisson_times, "bursty": bursty_times}


def parse_loss(text: str) -> NodeLoss:
    """Parse NODE@SECONDS+DOWN: a node is lost at a time and returns after DOWN seconds."""
    found = re.fullmatch(r"(\d+)@(\d+(?:\.\d+)?)\+(\d+(?:\.\d+)?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE@SECONDS+DOWN, such as 0@5+20")
    return NodeLoss(at=float(found[2]), node=int(found[1]), down_seconds=float(found[3]))


def count(text: str) -> int:
    """Parse a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def make_trace(given: argparse.Namespace) -> list[TraceRequest]:
    """Return the generated trace. --rate counts requests; a conversation has several."""
    rng = random.Random(given.seed)
    mix = MIXES[given.mix]
    times = ARRIVALS[given.arrivals](rng, given.rate / mix.mean_turns)
    return generate_trace(rng, times, given.requests, mix)


def make_engine_shape(given: argparse.Namespace) -> EngineShape:
    return EngineShape(
        num_blocks=given.blocks,
        block_size=given.block_size,
        max_num_seqs=given.max_num_seqs,
        max_model_len=given.max_model_len,
        max_num_batched_tokens=given.step_tokens,
    )


def run(given: argparse.Namespace) -> None:
    trace = make_trace(given) if given.trace is None else read_trace(given.trace)
    costs = GPU_8B
    if given.costs is not None:
        costs = msgspec.json.decode(given.costs.read_bytes(), type=StepCosts)
    shape = FleetShape(
        given.replicas,
        make_engine_shape(given),
        replicas_per_node=given.replicas_per_node,
        max_queue=parse_queue(given.max_queue),
        detection_seconds=given.detection_seconds,
    )
    report = FleetSimulator(shape, costs, trace, given.lose).run()
    print(describe_report(report))
    print(msgspec.json.encode(report).decode())


def study(given: argparse.Namespace) -> None:
    reports: dict[str, FleetReport] = {}
    for scenario in SCENARIOS:
        reports[scenario.name] = simulate_scenario(scenario, given.replicas, given.seed)
        print(f"{scenario.name}\n{describe_report(reports[scenario.name])}\n", flush=True)
    print(format_study(reports))
    print(msgspec.json.encode(reports).decode())


def check(given: argparse.Namespace) -> None:
    stop_on_signals()
    found = []
    for comparison in validate(given.model, given.rounds):
        found.append(comparison)
        print(msgspec.json.encode(comparison).decode(), flush=True)
    print(format_comparisons(found))
    print(msgspec.json.encode(found).decode())


def generate(given: argparse.Namespace) -> None:
    trace = make_trace(given)
    write_trace(given.file, trace)
    print(f"{len(trace)} requests in {trace[-1].at:.1f} s: {given.file}")


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arrivals", choices=ARRIVALS, default="poisson")
    parser.add_argument("--mix", choices=MIXES, default="conversations")
    parser.add_argument("--requests", type=count, default=2000)
    parser.add_argument("--rate", type=positive, default=60.0, help="requests per second on average")
    parser.add_argument("--seed", type=int, default=0)


def add_fleet_arguments(parser: argparse.ArgumentParser, replicas: int) -> None:
    parser.add_argument("--replicas", type=count, default=replicas)
    parser.add_argument("--replicas-per-node", type=count, default=8)
    parser.add_argument("--blocks", type=count, default=8192, help="KV cache blocks of each engine")
    parser.add_argument("--block-size", type=count, default=16)
    parser.add_argument("--max-num-seqs", type=count, default=256)
    parser.add_argument("--max-model-len", type=count, default=32768)
    parser.add_argument("--step-tokens", type=count, default=2048, help="--max-num-batched-tokens")
    parser.add_argument("--max-queue", default="2048,4M", help="like the daemon's option")
    parser.add_argument("--detection-seconds", type=positive, default=5.0, help="until a lost node is noticed")
    parser.add_argument(
        "--costs", type=Path, help="JSON file of StepCosts; default: an 8B model on a GPU, by arithmetic"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="simulate a trace")
    one.add_argument("--trace", type=Path, help="JSON lines; default: generated from the arguments below")
    add_trace_arguments(one)
    add_fleet_arguments(one, replicas=16)
    one.add_argument("--lose", type=parse_loss, action="append", default=[], metavar="NODE@SECONDS+DOWN")
    one.set_defaults(call=run)
    one = commands.add_parser("study", help="the study of docs/simulation.md; takes minutes")
    one.add_argument("--replicas", type=count, default=1000)
    one.add_argument("--seed", type=int, default=0)
    one.set_defaults(call=study)
    one = commands.add_parser("validate", help="compare with a real daemon on this machine, which should be quiet")
    one.add_argument("--model", default="demo")
    one.add_argument("--rounds", type=count, default=3)
    one.set_defaults(call=check)
    one = commands.add_parser("generate", help="write a trace")
    one.add_argument("file", type=Path)
    add_trace_arguments(one)
    one.set_defaults(call=generate)
    return parser


def main() -> int:
    given = build_parser().parse_args()
    try:
        given.call(given)
    except (OSError, RuntimeError, StartError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    gc.disable()  # the simulation produces no garbage before its end
    sys.exit(main())
