"""Times the kernels of this machine: `python -m serve_llm.kernels.bench`. A table for people, then one line of JSON.

Each time is the median of repeated calls. GB/s count the weights or cached keys and values read once, or what a
kernel for rows reads and writes; GFLOP/s the multiplications and additions (of the causal half in a prefill), each also
as a share of what the machine was measured to give in the same run: a sum over memory beyond the caches, and a large
bfloat16 matrix product. Where there is a GPU its kernels are timed instead: `bench_gpu`.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from serve_llm.kernels import table
from serve_llm.kernels.huge_pages import use_huge_pages
from serve_llm.kernels.sampling import Draw

CPU = torch.device("cpu")
LINEARS = [(9728, 896), (2048, 8192), (151936, 896)]  # outputs, inputs
EXPERTS = [(128, 8, 2048, 768), (8, 2, 1024, 3584)]  # experts, chosen of them, width, inner
HEADS = [(14, 2, 64), (32, 8, 128)]  # heads, kv_heads, head_dim
VOCABULARY = 151936
DRAWS = {
    "greedy": Draw(0.0, 0, 1.0, 0.0, 0.0),
    "top_p 0.9": Draw(1.0, 0, 0.9, 0.0, 0.4),
    "top_k 50": Draw(1.0, 50, 1.0, 0.0, 0.4),
}
STEPS = [(1, 1, 128), (1, 1, 4096), (8, 1, 1024), (32, 1, 1024), (1, 512, 512), (1, 2048, 2048)]
# sequences, new tokens of each, context of each
COLD_STEPS = [(1, 256), (8, 256), (32, 256), (8, 1024)]  # sequences, context of each
BLOCK_SIZE = 16


def median_us(call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Of at least 5 calls after a first one, for about half a second. before: called in front of each, not timed."""
    call()
    times: list[float] = []
    while len(times) < 5 or sum(times) < 0.5:
        before()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


@dataclass(frozen=True)
class Timed:
    us: float
    num_bytes: int
    operations: float


def linear_times() -> dict[str, Timed]:
    found = {}
    for outputs, inputs in LINEARS:
        weight = torch.randn((outputs, inputs)).bfloat16()
        layer = table.choose(CPU, torch.bfloat16, {64}).pack(weight, None)
        for rows in (1, 8, 64):
            x = torch.randn((rows, inputs)).bfloat16()
            us = median_us(partial(layer, x))
            found[f"linear {outputs}x{inputs} bf16, {rows} rows"] = Timed(us, weight.nbytes, 2 * rows * weight.numel())
    return found


def expert_times() -> dict[str, Timed]:
    """Of random choices, as the weights of a random model give them."""
    found = {}
    kernels = table.choose(CPU, torch.bfloat16, {64})
    for experts, chosen, width, inner in EXPERTS:
        first, last = (torch.randn(shape).bfloat16() for shape in ((2 * inner, width), (width, inner)))
        pairs = ((kernels.pack(first, None), kernels.pack(last, None)) for _ in range(experts))
        packed = kernels.pack_experts(pairs, kernels.activations["silu_and_mul"], range(experts))
        for rows in (1, 8, 64, 512):
            x = torch.randn((rows, width)).bfloat16()
            weights, numbers = torch.randn((rows, experts)).softmax(-1).topk(chosen)
            read = len(numbers.unique()) * (first.nbytes + last.nbytes)
            name = f"experts {experts}/{chosen} {inner}x{width} bf16, {rows} rows"
            operations = 2 * rows * chosen * (first.numel() + last.numel())
            found[name] = Timed(median_us(partial(packed, x, weights, numbers)), read, operations)
    return found


def attention_times() -> dict[str, Timed]:
    attention = table.choose(CPU, torch.bfloat16, {head_dim for *_, head_dim in HEADS}).paged_attention
    found = {}
    for heads, kv_heads, head_dim in HEADS:
        for sequences, queries, context in STEPS:
            blocks = context // BLOCK_SIZE
            cache = torch.randn((sequences * blocks, 2, kv_heads, BLOCK_SIZE, head_dim)).bfloat16()
            block_table = torch.randperm(sequences * blocks).view(sequences, blocks).int()
            query = torch.randn((sequences * queries, heads, head_dim)).bfloat16()
            starts = list(range(0, sequences * queries + 1, queries))
            call = partial(attention, query, cache, block_table, starts, [context] * sequences, scale=head_dim**-0.5)
            pairs = sequences * (queries * (context - queries) + queries * (queries + 1) / 2)
            name = f"attention {heads}/{kv_heads}/{head_dim} bf16, {sequences} x {queries} of {context}"
            found[name] = Timed(median_us(call), cache.nbytes, 4 * heads * head_dim * pairs)
    return found


def cold_attention_times() -> dict[str, Timed]:
    """Decoding as in a step of a model: blocks that hold all layers, and other memory is read between two layers."""
    layers, (heads, kv_heads, head_dim) = 24, HEADS[0]
    attention = table.choose(CPU, torch.bfloat16, {head_dim}).paged_attention
    others = torch.ones(1 << 24)
    found = {}
    for sequences, context in COLD_STEPS:
        blocks = context // BLOCK_SIZE
        flat = torch.empty((sequences * blocks, layers, 2, kv_heads, BLOCK_SIZE, head_dim), dtype=torch.bfloat16)
        use_huge_pages(flat)
        cache = flat.normal_()
        block_table = torch.randperm(sequences * blocks).view(sequences, blocks).int()
        query = torch.randn((sequences, heads, head_dim)).bfloat16()
        lengths = (list(range(sequences + 1)), [context] * sequences)

        calls = [
            partial(attention, query, cache[:, i], block_table, *lengths, scale=head_dim**-0.5) for i in range(layers)
        ]
        turns = itertools.cycle(calls)
        name = f"attention {heads}/{kv_heads}/{head_dim} bf16, {sequences} x 1 of {context}, cold"
        pairs = sequences * context
        us = median_us(lambda turns=turns: next(turns)(), before=others.sum)
        found[name] = Timed(us, cache.nbytes // layers, 4 * heads * head_dim * pairs)
    return found


def row_times() -> dict[str, Timed]:
    """Of a decode step and of a prompt; bytes read and written, arithmetic not counted."""
    kernels = table.choose(CPU, torch.bfloat16, {64})
    heads, kv_heads, head_dim, width, inner = 14, 2, 64, 896, 4864
    weight = torch.randn(width).bfloat16()
    cache = torch.zeros((64, 2, kv_heads, BLOCK_SIZE, head_dim)).bfloat16()
    found = {}
    for rows in (1, 32, 512):
        hidden, up = torch.randn((rows, width)).bfloat16(), torch.randn((rows, 2 * inner)).bfloat16()
        qkv = torch.randn((rows, (heads + 2 * kv_heads) * head_dim)).bfloat16()
        angles, slots = (torch.randn(rows, head_dim // 2), torch.randn(rows, head_dim // 2)), torch.randperm(512)[:rows]
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "rms_norm": (partial(kernels.rms_norm, hidden, weight, 1e-6), 2 * hidden.nbytes),
            "add_rms_norm": (
                partial(kernels.add_rms_norm, hidden, torch.zeros_like(hidden), weight, 1e-6),
                4 * hidden.nbytes,
            ),
            "rope_and_cache": (
                partial(kernels.rope_and_cache, qkv, heads, None, angles, cache, slots),
                2 * qkv.nbytes + 2 * angles[0].nbytes,
            ),
            "silu_and_mul": (partial(kernels.activations["silu_and_mul"], up), up.nbytes * 3 // 2),
            "gelu_tanh_and_mul": (partial(kernels.activations["gelu_tanh_and_mul"], up), up.nbytes * 3 // 2),
            "gelu": (partial(kernels.activations["gelu"], up), 2 * up.nbytes),
            "gelu_tanh": (partial(kernels.activations["gelu_tanh"], up), 2 * up.nbytes),
        }
        for name, (call, num_bytes) in calls.items():
            found[f"{name} bf16, {rows} rows"] = Timed(median_us(call), num_bytes, 0)
    return found


def sampling_times() -> dict[str, Timed]:
    """Of logits that are as flat as a random model's: more is left for top_p to select from than with a trained one."""
    kernels = table.choose_sampling(CPU)
    found = {}
    for rows in (1, 8, 32):
        logits = torch.randn((rows, VOCABULARY)).bfloat16()
        for name, draw in DRAWS.items():
            us = median_us(partial(kernels.choose, logits, [draw] * rows))
            found[f"sampling {VOCABULARY} bf16, {rows} rows, {name}"] = Timed(us, logits.nbytes, 0.0)
    return found


def limits() -> tuple[float, float]:
    """GB/s of memory, GFLOP/s of a bfloat16 matrix product."""
    memory = torch.ones(1 << 27)
    bandwidth = memory.nbytes / median_us(partial(torch.sum, memory)) / 1000
    square = torch.randn((2048, 2048)).bfloat16()
    return bandwidth, 2 * 2048**3 / median_us(partial(torch.mm, square, square)) / 1000


def main() -> None:
    if torch.cuda.is_available():
        from serve_llm.kernels import bench_gpu

        bench_gpu.main()
        return
    bandwidth, peak = limits()
    print(f"{torch.get_num_threads()} threads: memory {bandwidth:.0f} GB/s, bf16 matrix product {peak:.0f} GFLOP/s")
    times = (
        linear_times() | expert_times() | attention_times() | cold_attention_times() | row_times() | sampling_times()
    )
    report(times, bandwidth, peak)


def report(times: Mapping[str, Timed], bandwidth: float, peak: float) -> None:
    """bandwidth: GB/s, peak: GFLOP/s, of which the shares are."""
    for name, timed in times.items():
        gigabytes, gigaflops = timed.num_bytes / timed.us / 1000, timed.operations / timed.us / 1000
        reads = f"{gigabytes:7.1f} GB/s {gigabytes / bandwidth:5.0%}"
        print(f"{name:50} {timed.us:9.1f} us {reads} {gigaflops:8.0f} GFLOP/s {gigaflops / peak:5.0%}")
    print(json.dumps({name: round(timed.us, 1) for name, timed in times.items()}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
