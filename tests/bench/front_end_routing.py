"""Check that routing by cached prefix works as well with several front ends: prefix cache hit rates of real servers.

Run: PYTHONPATH=tests python -m bench.front_end_routing [--front-ends 4] [--engines 2] [--requests 400] [--turns 3]

The trace is the prefix-heavy one of bench.routing, with prefixes that fit the demo model: 12 of 512 tokens per engine,
the k-th with a frequency proportional to 1 / k; each prompt adds 20 to 199 tokens of its own. The engines' caches
together hold little more than the prefixes, so misplaced prefixes evict each other. Each request opens a connection of
its own, so that all front ends take part. Hit rates come from /metrics. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from bench.routing import shared
from support.daemon import Daemon

PREFIXES_PER_ENGINE = 12
PREFIX_TOKENS = 512
CACHE = "24MiB"  # 8,192 tokens of the demo model
IDS = range(10, 4000)
NUM_CLIENTS = 8


def make_prompts(number: int, num_engines: int, seed: int) -> list[list[int]]:
    prompts = shared(random.Random(seed), PREFIXES_PER_ENGINE * num_engines, PREFIX_TOKENS)
    return [[IDS[one % len(IDS)] for one in prompt] for prompt in islice(prompts, number)]


def measure(prompts: list[list[int]], front_ends: int, engines: int) -> float:
    """Return the share of prompt tokens that a fresh server finds in its engines' prefix caches."""
    arguments = ("demo", "-dp", str(engines), "--front-ends", str(front_ends), "--kv-cache-memory", CACHE)
    with Daemon(*arguments) as daemon:
        url = daemon.wait_until_serving()

        def complete(prompt: list[int]) -> None:
            body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "seed": 1}
            headers = {"content-type": "application/json", "connection": "close"}
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=600) as answer:
                answer.read()

        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            list(clients.map(complete, prompts))
        counts = daemon.metrics()
    return counts["serve_llm_prefix_cache_hits_total"] / counts["serve_llm_prefix_cache_queries_total"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--front-ends", type=int, default=4)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    found: dict[int, list[float]] = {1: [], given.front_ends: []}
    for turn in range(given.turns):
        prompts = make_prompts(given.requests, given.engines, seed=turn)
        for front_ends, rates in found.items():
            rates.append(measure(prompts, front_ends, given.engines))
    for front_ends, rates in found.items():
        print(f"{front_ends} front ends: hit rate {statistics.median(rates):.1%} ({min(rates):.1%}-{max(rates):.1%})")
    ratios = [several / one for one, several in zip(found[1], found[given.front_ends], strict=True)]
    print(f"ratio: {statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
    print(json.dumps({"engines": given.engines, "requests": given.requests, "hit_rates": found, "ratios": ratios}))


if __name__ == "__main__":
    main()
