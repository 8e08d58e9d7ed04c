"""Measure how a daemon handles three times the requests that it can serve, and how it shares capacity among ten keys.

Run: python tests/bench/overload.py [--seconds 8] [--model demo]

All requests have the same prompt and output lengths. The peak is measured with enough clients to keep the daemon busy,
each of which sends its next request when the last one has ended. Then requests arrive at three times that rate,
regardless of the replies, each with a deadline (X-Request-Timeout) of twice the latency at the peak; *goodput* is the
number of requests per second that succeed in time. *Jain's index* is (sum x)^2 / (n sum x^2) of the tokens that each
of ten keys received, where one key sends ten times as much as each of the others, at three times the capacity in
total: 1 means equal shares, 0.1 means one key gets everything. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

SERVE_LLM = str(Path(sys.executable).with_name("serve-llm"))
KEYS = [f"key{number}" for number in range(10)]
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 32
CLIENTS = 48  # number of clients used to find the peak


@dataclass
class Tally:
    """Counts of request outcomes."""

    good: int = 0
    late: int = 0  # ended by their deadline
    refused: int = 0
    tokens: Counter[str] = field(default_factory=Counter)  # received by each key


async def request(port: int, key: str, rng: random.Random, tally: Tally, deadline: float = 3600.0) -> int:
    """Send one request with a deadline in seconds. Returns its status."""
    ids = [rng.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]
    body = json.dumps({"prompt": ids, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "temperature": 0}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    head += f"X-Request-Timeout: {deadline:.3f}\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    status = int(answer[9:12])
    if status == 200:
        tally.good += 1
        tally.tokens[key] += PROMPT_TOKENS + OUTPUT_TOKENS
    elif status == 504:
        tally.late += 1
    else:
        tally.refused += 1
    return status


async def closed_loop(port: int, seconds: float, rng: random.Random) -> float:
    """Return the goodput with CLIENTS clients that each wait for their replies."""
    tally = Tally()
    ends = time.monotonic() + seconds

    async def client(number: int) -> None:
        while time.monotonic() < ends:
            await request(port, KEYS[number % len(KEYS)], rng, tally)

    began = time.monotonic()
    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return tally.good / (time.monotonic() - began)


async def open_loop(
    port: int, seconds: float, rates: dict[str, float], deadline: float, rng: random.Random
) -> tuple[float, Tally]:
    """Return the goodput with requests that arrive at random; rates: requests per second of each key."""
    tally, sent = Tally(), []
    total, began = sum(rates.values()), time.monotonic()
    at = began
    while (at := at + rng.expovariate(total)) < began + seconds:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        (key,) = rng.choices(list(rates), list(rates.values()))
        sent.append(asyncio.ensure_future(request(port, key, rng, tally, deadline)))
    await asyncio.gather(*sent)
    return tally.good / (time.monotonic() - began), tally


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


async def measure(port: int, seconds: float) -> dict[str, float]:
    rng = random.Random(1)  # shared, so that no prompt is cached from an earlier phase
    await closed_loop(port, 2.0, rng)  # warm up
    peak = await closed_loop(port, seconds, rng)
    deadline = 2 * CLIENTS / peak
    even, tally = await open_loop(port, seconds, {key: 3 * peak / len(KEYS) for key in KEYS}, deadline, rng)
    rates = {key: 3 * peak / 19 * (10 if key == KEYS[0] else 1) for key in KEYS}
    _, uneven = await open_loop(port, seconds, rates, deadline, rng)
    return {
        "peak_requests_per_second": round(peak, 1),
        "deadline_seconds": round(deadline, 2),
        "goodput_at_three_times": round(even, 1),
        "goodput_share_of_peak": round(even / peak, 3),
        "late": tally.late,
        "refused": tally.refused,
        "jain_ten_keys_one_heavy": round(jain([uneven.tokens[key] for key in KEYS]), 3),
        "heavy_key_share": round(uneven.tokens[KEYS[0]] / max(1, sum(uneven.tokens.values())), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--model", default="demo")
    given = parser.parse_args()
    keys = [part for key in KEYS for part in ("--api-key", key)]
    command = [SERVE_LLM, given.model, "--port", "0", "--max-num-seqs", "32", *keys]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stderr is not None
        port = 0
        for line in daemon.stderr:
            if found := re.search(r"Serving .* on http://\S+:(\d+)", line):
                port = int(found[1])
                break
        threading.Thread(target=daemon.stderr.read, daemon=True).start()
        try:
            result = asyncio.run(measure(port, given.seconds))
        finally:
            daemon.terminate()
    for name, value in result.items():
        print(f"{name:32} {value:>10}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
