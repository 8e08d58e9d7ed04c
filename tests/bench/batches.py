"""What interactive requests feel of a stored batch: their latencies beside one and without, in turns.

Run on a quiet machine: PYTHONPATH=tests python -m bench.batches [--model demo] [--requests 100] [--turns 3]

One client sends a request, waits for its answer, and sends the next after a short random pause, so that the batch gets
the engine in between. Beside it runs a batch of requests of the same lengths, cancelled at the end of each turn. Prints
medians and 99th percentiles, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import tempfile
import time
import urllib.request
from pathlib import Path

import uvloop

from bench.load import Target
from bench.model import IDS, model_folder
from bench.servers import SERVE_LLM, named, running, stop_on_signals
from bench.workloads import percentile
from serve_llm.cli.bench.client import TimedReply

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
PAUSE_SECONDS = 0.2  # the longest
BATCH_LINES = 5000
QUIET, BESIDE = "quiet", "beside a batch"


async def ask(url: str, num_requests: int, seed: int) -> list[TimedReply]:
    target = Target(url, None)
    chooser = random.Random(seed)
    replies = []
    for _ in range(num_requests):
        await asyncio.sleep(chooser.random() * PAUSE_SECONDS)
        prompt = [chooser.choice(IDS) for _ in range(PROMPT_TOKENS)]
        replies.append(await target.complete(prompt, OUTPUT_TOKENS))
    return replies


def call(url: str, content: bytes | None, kind: str = "application/json") -> dict[str, object]:
    request = urllib.request.Request(url, content, {"Content-Type": kind})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def start_batch(url: str, seed: int) -> str:
    """Its id, once it answers requests."""
    chooser = random.Random(seed)
    body = {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {**body, "prompt": prompt}}
        for number in range(BATCH_LINES)
        for prompt in [[chooser.choice(IDS) for _ in range(PROMPT_TOKENS)]]
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


def summarise(replies: list[TimedReply]) -> dict[str, float]:
    """In ms."""
    whole = [reply.times[-1] - reply.began for reply in replies]
    first = [reply.times[0] - reply.began for reply in replies]
    later = [(reply.times[-1] - reply.times[0]) / (OUTPUT_TOKENS - 1) for reply in replies]
    return {
        f"{name} p{share}": 1000 * percentile(values, share / 100)
        for name, values in (("request", whole), ("first token", first), ("token", later))
        for share in (50, 99)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the 0.5B shape with random weights")
    parser.add_argument("--requests", type=int, default=100, help="in each turn, with and without")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    stop_on_signals()
    model = given.model or str(model_folder())
    replies: dict[str, list[TimedReply]] = {QUIET: [], BESIDE: []}
    rates = []
    with tempfile.TemporaryDirectory() as work:
        command = f"{shlex.quote(SERVE_LLM)} {{model}} --port {{port}} --batches-dir {Path(work) / 'batches'}"
        with running(named(f"serve-llm={command}", model)) as server:
            uvloop.run(ask(server.url, 5, 999))
            for turn in range(given.turns):
                replies[QUIET] += uvloop.run(ask(server.url, given.requests, turn))
                batch_id = start_batch(server.url, turn)
                before = count_done(server.url, batch_id), time.perf_counter()
                replies[BESIDE] += uvloop.run(ask(server.url, given.requests, 100 + turn))
                rates.append((count_done(server.url, batch_id) - before[0]) / (time.perf_counter() - before[1]))
                end_batch(server.url, batch_id)
    found = {kind: summarise(answered) for kind, answered in replies.items()}
    for name in found[QUIET]:
        quiet, beside = found[QUIET][name], found[BESIDE][name]
        print(f"{name:20}{quiet:10.1f} ms{beside:10.1f} ms beside a batch{beside / quiet:8.2f} x")
    print(f"lines of the batch per second: {', '.join(f'{rate:.1f}' for rate in rates)}")
    print(json.dumps({"ms": found, "batch_lines_per_second": rates}))


if __name__ == "__main__":
    main()
