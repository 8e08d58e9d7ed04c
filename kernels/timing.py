"""Timing shared by the benchmarks of CPU and GPU kernels: calls, sampling kernels, and the table of results."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from serve_llm.kernels import registry
from serve_llm.kernels.sampling import Draw

Random = Callable[..., Tensor]  # creates a normal bfloat16 tensor of any shape on the benchmarked device
DRAWS = {
    "greedy": Draw(0.0, 0, 1.0, 0.0, 0.0),
    "top_p 0.9": Draw(1.0, 0, 0.9, 0.0, 0.4),
    "top_k 50": Draw(1.0, 50, 1.0, 0.0, 0.4),
}


def median_us(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Median microseconds over half a second, at least 5 calls, after one warm-up. before: runs untimed before each."""
    call()
    times: list[float] = []
    total = 0.0
    while len(times) < 5 or total < 0.5:
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        total += times[-1]
    return statistics.median(times) * 1e6


@dataclass(frozen=True)
class Timing:
    us: float
    num_bytes: int
    operations: float


def sampling_times(random: Random, vocabulary: int, row_counts: Sequence[int]) -> dict[str, Timing]:
    """Time sampling from normal logits, which are flatter than a trained model's and so leave top_p more candidates."""
    kernels = registry.choose_sampling(random(0).device)
    found = {}
    for rows in row_counts:
        logits = random(rows, vocabulary)
        for name, draw in DRAWS.items():
            us = median_us(partial(kernels.sample, logits, [draw] * rows))
            found[f"sampling {vocabulary} bf16, {rows} rows, {name}"] = Timing(us, logits.nbytes, 0.0)
        masks = random(rows, 2 * -(-vocabulary // 32)).view(torch.int32)
        us = median_us(partial(kernels.apply_masks, logits, range(rows), masks))
        found[f"masks {vocabulary} bf16, {rows} rows"] = Timing(us, logits.nbytes + masks.nbytes, 0.0)
    return found


def report(times: Mapping[str, Timing], bandwidth: float, peak: float) -> None:
    """Print the times, with their shares of bandwidth (GB/s) and peak (GFLOP/s)."""
    for name, timed in times.items():
        gigabytes = timed.num_bytes / timed.us / 1000
        gigaflops = timed.operations / timed.us / 1000
        reads = f"{gigabytes:7.1f} GB/s {gigabytes / bandwidth:5.0%}"
        print(f"{name:50} {timed.us:9.1f} us {reads} {gigaflops:8.0f} GFLOP/s {gigaflops / peak:5.0%}")
    print(json.dumps({name: round(timed.us, 1) for name, timed in times.items()}))
