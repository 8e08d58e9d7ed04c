"""Compare routing by cached prefix with simpler rules: prefix cache hit rate and time to first token.

Run: PYTHONPATH=tests python -m bench.routing [--engines 4] [--requests 4000] [--seed 0]

The engines are real schedulers with real prefix indexes; only the model is simulated, by a step time that grows with
the tokens computed. Time is virtual, so the figures are the same on every machine and in every run. Prints a table,
then one JSON line.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, Sampling
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.scheduler.scheduler import Scheduler
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.server.engines.router import Router

BLOCK_SIZE = 16
NUM_BLOCKS = 4096  # 65,536 tokens per engine
STEP_TOKENS = 2048
# A step of an 8B model on one GPU, roughly; only the ratio of the two matters here.
STEP_SECONDS = 0.010
TOKEN_SECONDS = 0.000_033

Arrival = tuple[float, EngineCoreRequest]  # virtual seconds


class Engine:
    """A scheduler in virtual time."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(
            [KVCacheSpec(BLOCK_SIZE, None)],
            NUM_BLOCKS,
            max_num_seqs=256,
            max_model_len=8192,
            max_chunk=STEP_TOKENS,
            prefix_caching=True,
        )
        self.batch: SchedulerOutput | None = None

    def begin(self, now: float) -> float | None:
        """Start a step. Returns the time at which it ends, or None if there is nothing to do."""
        batch = self.scheduler.schedule(STEP_TOKENS, now)
        if not batch.scheduled:
            return None
        self.batch = batch
        return now + STEP_SECONDS + batch.num_tokens * TOKEN_SECONDS

    def end(self) -> list[EngineCoreOutput]:
        assert self.batch is not None
        results = []
        for chunk in self.batch.scheduled:
            result = RunnerOutput()
            if chunk.sample:
                result.token_id = 1
            results.append(result)
        batch, self.batch = self.batch, None
        return self.scheduler.update_from_output(batch, results)


class RoundRobin(Router):
    """Route to each engine in turn."""

    def place(self, request_ids: Iterable[int], prompt_ids: Sequence[int], salt: str = "") -> int:
        self._next = (self._next + 1) % len(self.loads)
        for request_id in request_ids:
            self._open[request_id] = (self._next, 0)
            self.loads[self._next].num_open += 1
        return self._next


def least_loaded(num_engines: int) -> Router:
    return Router([0] * num_engines, BLOCK_SIZE)


def by_prefix(num_engines: int) -> Router:
    return Router([NUM_BLOCKS] * num_engines, BLOCK_SIZE)


def round_robin(num_engines: int) -> Router:
    return RoundRobin([0] * num_engines, BLOCK_SIZE)


@dataclass
class Found:
    hit_rate: float
    ttft_p50: float
    ttft_p99: float
    latency_p99: float
    largest_share: float  # requests of all engines that went to one engine


def simulate(arrivals: list[Arrival], num_engines: int, make: Callable[[int], Router]) -> Found:
    balancer, engines = make(num_engines), [Engine() for _ in range(num_engines)]
    arrived, order = {request.id: at for at, request in arrivals}, count()
    events: list[tuple[float, int, EngineCoreRequest | int]] = [(at, next(order), request) for at, request in arrivals]
    heapq.heapify(events)
    firsts, ends, placed = [], [], [0] * num_engines
    while events:
        now, _, event = heapq.heappop(events)
        if isinstance(event, EngineCoreRequest):
            index = balancer.place([event.id], event.prompt_ids)
            placed[index] += 1
            engines[index].scheduler.add(event, now)
        else:
            index = event
            for output in engines[index].end():
                if output.cached_tokens is not None:
                    balancer.mark_computed(output.id)
                    firsts.append(now - arrived[output.id])
                if output.finish_reason is not None:
                    balancer.release(output.id)
                    ends.append(now - arrived[output.id])
        if engines[index].batch is None and (until := engines[index].begin(now)) is not None:
            heapq.heappush(events, (until, next(order), index))
    assert len(ends) == len(arrivals), "a request was lost"
    stats = [engine.scheduler.stats() for engine in engines]
    hits = sum(one.prefix_cache_hits for one in stats) / sum(one.prefix_cache_queries for one in stats)
    first, last = statistics.quantiles(firsts, n=100), statistics.quantiles(ends, n=100)
    return Found(hits, first[49], first[98], last[98], max(placed) / len(arrivals))


def _requests(rng: random.Random, rate: float, prompts: Iterator[list[int]], number: int) -> list[Arrival]:
    """Return Poisson arrivals at `rate` per second, each with 8 to 128 output tokens."""
    now, found = 0.0, []
    for index in range(number):
        now += rng.expovariate(rate)
        sampling = Sampling(max_tokens=rng.randrange(8, 128), seed=0)
        found.append((now, EngineCoreRequest(id=index, prompt_ids=next(prompts), sampling=sampling)))
    return found


def _ids(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(2, 100_000) for _ in range(number)]


def shared(rng: random.Random, num_prefixes: int, num_tokens: int) -> Iterator[list[int]]:
    """Yield prompts that begin with one of `num_prefixes` texts, the k-th with frequency 1 / k, and then differ."""
    prefixes = [_ids(rng, num_tokens) for _ in range(num_prefixes)]
    weights = [1 / place for place in range(1, num_prefixes + 1)]
    while True:
        yield rng.choices(prefixes, weights)[0] + _ids(rng, rng.randrange(20, 200))


def conversations(rng: random.Random, num_open: int) -> Iterator[list[int]]:
    """Yield prompts of `num_open` conversations, each prompt being everything said so far; they end after 3 to 10
    turns."""
    said = [_ids(rng, 300) for _ in range(num_open)]
    left = [rng.randrange(3, 11) for _ in range(num_open)]
    while True:
        index = rng.randrange(num_open)
        if left[index] == 0:
            said[index], left[index] = _ids(rng, 300), rng.randrange(3, 11)
        left[index] -= 1
        said[index] = said[index] + _ids(rng, rng.randrange(100, 500))
        yield said[index]


def unlike(rng: random.Random) -> Iterator[list[int]]:
    """Yield prompts that have nothing in common."""
    while True:
        yield _ids(rng, rng.randrange(50, 2000))


LOADS: dict[str, tuple[float, Callable[[random.Random], Iterator[list[int]]]]] = {
    # name: (requests per second and engine, prompts)
    "64 prefixes of 2,000 tokens": (12, lambda rng: shared(rng, 64, 2000)),
    "1 prefix of 2,000 tokens": (20, lambda rng: shared(rng, 1, 2000)),
    "100 conversations": (12, lambda rng: conversations(rng, 100)),
    "nothing shared": (12, unlike),
}
RULES = {"round robin": round_robin, "least loaded": least_loaded, "by prefix and load": by_prefix}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    result: dict[str, dict[str, dict[str, float]]] = {}
    print("| load | rule | hit rate | TTFT p50, ms | TTFT p99, ms | latency p99, s | busiest engine |")
    print("|---|---|---|---|---|---|---|")
    for load, (rate, prompts) in LOADS.items():
        for rule, make in RULES.items():
            rng = random.Random(given.seed)
            arrivals = _requests(rng, rate * given.engines, prompts(rng), given.requests)
            found = simulate(arrivals, given.engines, make)
            print(
                f"| {load} | {rule} | {found.hit_rate:.1%} | {found.ttft_p50 * 1e3:.0f} | {found.ttft_p99 * 1e3:.0f} "
                f"| {found.latency_p99:.2f} | {found.largest_share:.0%} |"
            )
            result.setdefault(load, {})[rule] = {name: round(value, 4) for name, value in vars(found).items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
