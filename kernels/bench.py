"""Times the kernels of this machine: `python -m serve_llm.kernels.bench`. A table for people, then one line of JSON.

Each time is the median of repeated calls, in microseconds; GB/s count the weights or cached keys and values read once.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from serve_llm.kernels import table

CPU = torch.device("cpu")
LINEARS = [(9728, 896), (2048, 8192), (151936, 896)]  # outputs, inputs
HEADS = [(14, 2, 64), (32, 8, 128)]  # heads, kv_heads, head_dim
BLOCK_SIZE = 16


def median_us(call: Callable[[], object]) -> float:
    """Of at least 5 calls after a first one, for about half a second."""
    call()
    times: list[float] = []
    while len(times) < 5 or sum(times) < 0.5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def linear_times() -> dict[str, tuple[float, int]]:
    """Name -> (us, bytes of weights)."""
    found = {}
    for outputs, inputs in LINEARS:
        weight = torch.randn((outputs, inputs)).bfloat16()
        layer = table.PORTABLE.pack(weight, None)
        for rows in (1, 8, 64):
            x = torch.randn((rows, inputs)).bfloat16()
            found[f"linear {outputs}x{inputs} bf16, {rows} rows"] = (median_us(partial(layer, x)), weight.nbytes)
    return found


def attention_times() -> dict[str, tuple[float, int]]:
    """Name -> (us, bytes of keys and values)."""
    attention = table.choose(CPU, torch.bfloat16, {size for *_, size in HEADS}).paged_attention
    found = {}
    for heads, kv_heads, head_dim in HEADS:
        for sequences, queries, context in ((1, 1, 1024), (8, 1, 1024), (32, 1, 1024), (1, 512, 512)):
            blocks = context // BLOCK_SIZE
            cache = torch.randn((sequences * blocks, 2, kv_heads, BLOCK_SIZE, head_dim)).bfloat16()
            block_table = torch.randperm(sequences * blocks).view(sequences, blocks).int()
            query = torch.randn((sequences * queries, heads, head_dim)).bfloat16()
            starts = list(range(0, sequences * queries + 1, queries))
            call = partial(attention, query, cache, block_table, starts, [context] * sequences, scale=head_dim**-0.5)
            name = f"attention {heads}/{kv_heads}/{head_dim} bf16, {sequences} x {queries} of {context}"
            found[name] = (median_us(call), cache.nbytes)
    return found


def main() -> None:
    times = linear_times() | attention_times()
    for name, (us, num_bytes) in times.items():
        print(f"{name:50} {us:10.0f} us {num_bytes / us / 1000:8.1f} GB/s")
    print(json.dumps({name: round(us, 1) for name, (us, _) in times.items()}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
