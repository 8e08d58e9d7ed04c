"""Measure how a stored batch slows interactive requests: their latencies with and without one, in turns.

Run on a quiet machine: PYTHONPATH=tests python -m bench.batches [--model demo] [--rate 2] [--requests 40] [--turns 10]

Requests arrive at random times with a fixed mean rate, whether or not earlier ones have been answered. In every second
phase a batch runs alongside and is cancelled at the end. Prints the median and the 99th percentile over all requests of
each kind, their ratio, and the quartiles of the ratios of single turns; then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import shlex
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.load import Result, Target, positive, summarise
from bench.model import IDS, model_folder
from bench.servers import SERVE_LLM, named, running, stop_on_signals
from bench.workloads import Workload, poisson_arrivals
from serve_llm.cli.bench.client import TimedReply

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32  # output tokens of an interactive request
BATCH_LINES, BATCH_PROMPT_TOKENS, BATCH_OUTPUT_TOKENS = 5000, 256, 64
QUIET, BESIDE = "quiet", "beside a batch"
FIGURES = {
    "first token p50": "ttft_p50",
    "first token p99": "ttft_p99",
    "between tokens p50": "itl_p50",
    "between tokens p99": "itl_p99",
}


async def ask(url: str, workload: Workload, turn: int, rate: float) -> list[TimedReply]:
    """Send the workload's requests at `rate` per second."""
    target = Target(url, None)
    began = time.perf_counter()

    async def arrive(prompt: list[int], after: float) -> TimedReply:
        await asyncio.sleep(began + after - time.perf_counter())
        return await target.complete(prompt, workload.output_tokens)

    arrivals = poisson_arrivals(rate, workload.requests, turn)
    return await asyncio.gather(*map(arrive, workload.prompts(turn, IDS), arrivals))


def call(url: str, content: bytes | None, kind: str = "application/json") -> dict[str, object]:
    request = urllib.request.Request(url, content, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def start_batch(url: str, seed: int) -> str:
    """Start a batch. Returns its id once it has answered some requests."""
    chooser = random.Random(seed)
    body = {"max_tokens": BATCH_OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": prompt}}
        for number in range(BATCH_LINES)
        for prompt in [chooser.choices(IDS, k=BATCH_PROMPT_TOKENS)]
    ]
    parts = (("purpose", "", "batch"), ("file", '; filename="in.jsonl"', "\n".join(map(json.dumps, lines))))
    form = "".join(
        f'--border\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'
        for name, more, value in parts
    )
    file = call(f"{url}/v1/files", f"{form}--border--\r\n".encode(), "multipart/form-data; boundary=border")
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = call(f"{url}/v1/batches", json.dumps(asked).encode())
    while count_done(url, str(batch["id"])) == 0:
        time.sleep(0.1)
    return str(batch["id"])


def count_done(url: str, batch_id: str) -> int:
    counts = call(f"{url}/v1/batches/{batch_id}", None)["request_counts"]
    assert isinstance(counts, dict)
    return int(counts["completed"])


def end_batch(url: str, batch_id: str) -> None:
    call(f"{url}/v1/batches/{batch_id}/cancel", b"")
    while call(f"{url}/v1/batches/{batch_id}", None)["status"] != "cancelled":
        time.sleep(0.1)


def find_percentiles(replies: Sequence[TimedReply]) -> dict[str, float]:
    """Return percentiles in ms."""
    result: Result = summarise(replies, 1.0, OUTPUT_TOKENS, 0.0)
    assert not result.errors and not result.short, result
    return {name: 1000 * getattr(result, field) for name, field in FIGURES.items()}


def parse_options(description: str | None, rate: float, requests: int, turns: int) -> argparse.Namespace:
    """Parse the command line. rate, requests, turns: the defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the 0.5B shape with random weights")
    parser.add_argument("--rate", type=positive, default=rate, help="interactive requests per second")
    parser.add_argument("--requests", type=int, default=requests, help="requests per turn, with and without a batch")
    parser.add_argument("--turns", type=int, default=turns)
    return parser.parse_args()


def main() -> None:
    given = parse_options(__doc__, rate=2.0, requests=40, turns=10)
    stop_on_signals()
    gc.freeze()  # a full collection of this process would count as latency
    model = given.model or str(model_folder())
    workload = Workload("interactive", 0, PROMPT_TOKENS, OUTPUT_TOKENS, given.requests)
    turns: dict[str, list[list[TimedReply]]] = {QUIET: [], BESIDE: []}
    rates = []
    with tempfile.TemporaryDirectory() as work:
        command = f"{shlex.quote(SERVE_LLM)} {{model}} --port {{port}} --batches-dir {Path(work) / 'batches'}"
        with running(named(f"serve-llm={command}", model)) as server:
            uvloop.run(ask(server.url, workload, -1, given.rate))
            for turn in range(given.turns):
                turns[QUIET].append(uvloop.run(ask(server.url, workload, 2 * turn, given.rate)))
                batch_id = start_batch(server.url, turn)
                before = count_done(server.url, batch_id), time.perf_counter()
                turns[BESIDE].append(uvloop.run(ask(server.url, workload, 2 * turn + 1, given.rate)))
                rates.append((count_done(server.url, batch_id) - before[0]) / (time.perf_counter() - before[1]))
                end_batch(server.url, batch_id)
    report(turns, rates)


def report(turns: dict[str, list[list[TimedReply]]], rates: Sequence[float]) -> None:
    """Print the figures. turns: replies of each turn. rates: answered batch lines per second, of each turn."""
    pooled = {kind: find_percentiles([reply for one in every for reply in one]) for kind, every in turns.items()}
    alone, beside = ([find_percentiles(one) for one in turns[kind]] for kind in (QUIET, BESIDE))
    ratios = {name: [b[name] / a[name] for a, b in zip(alone, beside, strict=True)] for name in FIGURES}
    for name, found in ratios.items():
        before, after = pooled[QUIET][name], pooled[BESIDE][name]
        low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
        print(
            f"{name:20}{before:9.1f} ms{after:9.1f} ms beside a batch{after / before:7.2f} x   "
            f"of a turn {middle:.2f} ({low:.2f}-{high:.2f})"
        )
    print(f"lines of the batch per second: {statistics.median(rates):.2f}")
    print(json.dumps({"ms": pooled, "ratios": ratios, "batch_lines_per_second": rates}))


if __name__ == "__main__":
    main()
