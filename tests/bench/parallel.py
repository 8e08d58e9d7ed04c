"""Measure the gain from several ranks on one host: decode speed of TP=2 and PP=2 against one rank, and each rank's
load.

Run on a quiet machine: PYTHONPATH=tests python -m bench.parallel [--streams 1 8] [--rounds 3] [--tokens 64].

The model has the 0.5B shape, bf16, with random weights. One rank computes with all cores, two ranks with one thread
each. All engines run at the same time and take turns, so that a slow moment of the machine affects all of them. Prints
a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.model import SHAPE
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine import startup
from serve_llm.engine.loop import EngineCore
from support.resolved import resolve_all

PROMPT_TOKENS = 128
GRIDS = {"one rank": (1, 1), "TP=2": (2, 1), "PP=2": (1, 2)}


def start(directory: Path, tensor: int, pipeline: int) -> EngineCore:
    options = make_options(
        str(directory),
        load_format="dummy",
        kv_cache_memory="512MiB",
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        enable_prefix_caching=False,
        log_level="warning",
    )
    config, spec, weights = resolve_all(options, str(directory), dict(SHAPE))
    return EngineCore(config, startup.build_executor(config, spec, weights, dict(SHAPE)))


def rank_processes() -> dict[int, psutil.Process]:
    """Return the processes of all ranks started so far, by id; an engine with one rank computes in this process."""
    return {child.pid: child for child in psutil.Process().children()}


def cpu_seconds(processes: list[psutil.Process]) -> list[float]:
    return [sum(process.cpu_times()[:2]) for process in processes]


def decode(engine: EngineCore, streams: int, tokens: int, processes: list[psutil.Process]) -> tuple[float, list[float]]:
    """Return (output tokens per second, CPU seconds per second of each process) from the last stream's first token
    on."""
    requests = [
        EngineCoreRequest(
            id=number,
            prompt_ids=[300 + number] * PROMPT_TOKENS,
            sampling=Sampling(temperature=0.0, seed=0, max_tokens=tokens),
        )
        for number in range(streams)
    ]
    engine.add_requests(requests)
    begun: set[int] = set()
    while len(begun) < streams:
        begun |= {output.id for output in engine.step().outputs if output.token_ids}
    before, began, count = cpu_seconds(processes), time.perf_counter(), 0
    while engine.has_work:
        outputs = engine.step().outputs
        count += sum(len(output.token_ids) for output in outputs)
        if any(output.finish_reason for output in outputs):
            break  # from here on, fewer streams run
    took = time.perf_counter() - began
    busy = [(b - a) / took for a, b in zip(before, cpu_seconds(processes), strict=True)]
    while engine.has_work:
        engine.step()
    return count / took, busy


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        engines, processes = {}, {}
        for name, grid in GRIDS.items():
            known = rank_processes()
            engines[name] = start(Path(directory), *grid)
            processes[name] = [process for pid, process in rank_processes().items() if pid not in known]
        results = {}
        for streams in arguments.streams:
            speeds: dict[str, list[float]] = {name: [] for name in GRIDS}
            busy: dict[str, list[list[float]]] = {name: [] for name in GRIDS}
            for engine in engines.values():
                decode(engine, streams, 8, [])  # warm up
            for _ in range(arguments.rounds):
                for name, engine in engines.items():
                    speed, shares = decode(engine, streams, arguments.tokens, processes[name])
                    speeds[name].append(speed)
                    busy[name].append(shares)
            for name in GRIDS:
                ratios = [a / b for a, b in zip(speeds[name], speeds["one rank"], strict=True)]
                shares = [round(statistics.median(column), 2) for column in zip(*busy[name], strict=True)]
                results[f"{name}, {streams} streams"] = {
                    "tokens_per_second": round(statistics.median(speeds[name]), 1),
                    "ratio": round(statistics.median(ratios), 3),
                    "ratios": [round(ratio, 3) for ratio in ratios],
                    "busy": shares,
                }
                sys.stdout.write(
                    f"{name:9} {streams:3} streams {statistics.median(speeds[name]):8.1f} tokens/s   "
                    f"{statistics.median(ratios):.2f} x one rank ({min(ratios):.2f}-{max(ratios):.2f})   "
                    f"ranks busy {', '.join(f'{share:.0%}' for share in shares) or '-'}\n"
                )
        sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
