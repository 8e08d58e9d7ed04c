"""The benchmark workloads: lengths, streams and token ids of W1 to W4, and arrival times.

Pure data and arithmetic. Prompts are token ids, so that every server computes the same number of tokens whatever its
tokenizer does. The individual parts of prompts differ from turn to turn, so that no turn finds another's prompts in a
prefix cache; the shared part is always the same, like a system prompt.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SHARED_SEED = 1024


@dataclass(frozen=True)
class Workload:
    """`requests` requests from `streams` clients that each send the next request when the last one is answered."""

    name: str
    streams: int
    prompt_tokens: int  # each request's individual part
    output_tokens: int
    requests: int
    shared_tokens: int = 0  # shared by every prompt, at its start
    texts: Sequence[Sequence[int]] = ()  # prompts instead of random ids; each turn takes the next `requests` of them
    temperature: float = 0.0

    def shared(self, ids: Sequence[int]) -> list[int]:
        rng = random.Random(SHARED_SEED)
        return [rng.choice(ids) for _ in range(self.shared_tokens)]

    def prompts(self, turn: int, ids: Sequence[int]) -> list[list[int]]:
        """Return one prompt per request. ids: the ids to choose from, for example those that every server can turn into
        text."""
        if self.texts:
            first = turn * self.requests
            return [list(self.texts[(first + number) % len(self.texts)]) for number in range(self.requests)]
        rng = random.Random(f"{self.name} {turn}")
        shared = self.shared(ids)
        return [shared + [rng.choice(ids) for _ in range(self.prompt_tokens)] for _ in range(self.requests)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", streams=1, prompt_tokens=128, output_tokens=128, requests=4),
        Workload("W2", streams=8, prompt_tokens=256, output_tokens=128, requests=16),
        Workload("W3", streams=32, prompt_tokens=256, output_tokens=64, requests=32),
        Workload("W4", streams=8, prompt_tokens=32, output_tokens=32, requests=16, shared_tokens=1024),
        Workload("tiny", streams=2, prompt_tokens=16, output_tokens=8, requests=4, shared_tokens=16),
    )
}
WARM = Workload("warm", streams=2, prompt_tokens=64, output_tokens=8, requests=2)


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Return the arrival times of `count` requests in seconds from the start, `rate` per second on average; the first
    is 0."""
    rng = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:count]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values lie, interpolated linearly; NaN if there are none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    lower = int(place)
    upper = min(lower + 1, len(ordered) - 1)
    return ordered[lower] + (ordered[upper] - ordered[lower]) * (place - lower)
