"""Benchmark the kernels of this machine: `python -m serve_llm.kernels.bench`. Prints a table, then one line of JSON.

Each time is the median of repeated calls. GB/s counts the weights or cached keys and values, read once, or what a row
kernel reads and writes. Weights in bfloat16 count as 16 bits also where the kernels hold 12 (decision 0064), so their
GB/s may exceed the limit. GFLOP/s counts multiplications and additions, in a prefill those of the causal half. Both are
also given as a share of limits measured in the same run: a sum over memory larger than the caches, and a large bfloat16
matrix product. On a machine with a GPU this benchmarks the GPU kernels instead: `bench_gpu`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from serve_llm.kernels import registry
from serve_llm.kernels.delta_rule import DeltaRule
from serve_llm.kernels.huge_pages import use_huge_pages
from serve_llm.kernels.linear_grouped import GroupQuantWeight
from serve_llm.kernels.timing import Timing, median_us, report, sampling_times

CPU = torch.device("cpu")
LINEARS = [(9728, 896), (2048, 8192), (151936, 896)]  # outputs, inputs
EXPERTS = [(128, 8, 2048, 768), (8, 2, 1024, 3584)]  # experts, top_k, hidden_size, intermediate_size
HEADS = [(14, 2, 64), (32, 8, 128)]  # heads, kv_heads, head_dim
VOCABULARY = 151936
BATCHES = [(1, 1, 128), (1, 1, 4096), (8, 1, 1024), (32, 1, 1024), (1, 512, 512), (1, 2048, 2048)]
# sequences, new tokens of each, context length of each
COLD_BATCHES = [(1, 256), (8, 256), (32, 256), (8, 1024)]  # sequences, context length of each
BLOCK_SIZE = 16


def linear_times() -> dict[str, Timing]:
    found = {}
    for outputs, inputs in LINEARS:
        weight = torch.randn((outputs, inputs)).bfloat16()
        layer = registry.choose(CPU, torch.bfloat16, {64}).pack(weight, None)
        for rows in (1, 8, 64):
            x = torch.randn((rows, inputs)).bfloat16()
            us = median_us(partial(layer, x))
            found[f"linear {outputs}x{inputs} bf16, {rows} rows"] = Timing(us, weight.nbytes, 2 * rows * weight.numel())
    return found


def grouped_times() -> dict[str, Timing]:
    """Time weights of 4 and 8 bits in groups, in the forms of int4, MXFP4, NVFP4 and block-wise fp8 checkpoints."""
    pack_grouped = registry.choose(CPU, torch.bfloat16, {64}).pack_grouped
    found = {}
    for outputs, inputs in LINEARS[:2]:
        codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)

        def scales(group_size: int, dtype: torch.dtype, rows: int = outputs, width: int = inputs) -> Tensor:
            return torch.rand((rows, width // group_size)).to(dtype)

        table = torch.arange(16.0)
        divisors = torch.ones(outputs)
        few = codes & 0xF
        no_nan = codes & 0xBF
        weights = {
            "int4 in groups of 128": GroupQuantWeight(few, 4, scales(128, torch.float16).float(), 128),
            "MXFP4": GroupQuantWeight(few, 4, scales(32, torch.float8_e8m0fnu), 32, table=table),
            "NVFP4": GroupQuantWeight(few, 4, scales(16, torch.float8_e4m3fn), 16, table=table, divisors=divisors),
            "fp8 in groups of 128": GroupQuantWeight(no_nan, 8, scales(128, torch.float32), 128, is_float8=True),
        }
        for name, weight in weights.items():
            layer = pack_grouped(weight, None, torch.bfloat16)
            num_bytes = codes.numel() * weight.bits // 8 + weight.scales.nbytes
            for rows in (1, 8, 64):
                x = torch.randn((rows, inputs)).bfloat16()
                us = median_us(partial(layer, x))
                found[f"linear {outputs}x{inputs} {name}, {rows} rows"] = Timing(
                    us, num_bytes, 2 * rows * codes.numel()
                )
    return found


def expert_times() -> dict[str, Timing]:
    """Time experts with random routing."""
    found = {}
    kernels = registry.choose(CPU, torch.bfloat16, {64})
    for experts, top_k, hidden_size, intermediate_size in EXPERTS:
        first, last = (
            torch.randn(shape).bfloat16()
            for shape in ((2 * intermediate_size, hidden_size), (hidden_size, intermediate_size))
        )
        pairs = ((kernels.pack(first, None), kernels.pack(last, None)) for _ in range(experts))
        packed = kernels.pack_experts(pairs, kernels.activations["silu_and_mul"], range(experts))
        for rows in (1, 8, 64, 512):
            x = torch.randn((rows, hidden_size)).bfloat16()
            weights, numbers = torch.randn((rows, experts)).softmax(-1).topk(top_k)
            read = len(numbers.unique()) * (first.nbytes + last.nbytes)
            name = f"experts {experts}/{top_k} {intermediate_size}x{hidden_size} bf16, {rows} rows"
            operations = 2 * rows * top_k * (first.numel() + last.numel())
            found[name] = Timing(median_us(partial(packed, x, weights, numbers)), read, operations)
    return found


def attention_times() -> dict[str, Timing]:
    attention = registry.choose(CPU, torch.bfloat16, {head_dim for *_, head_dim in HEADS}).paged_attention
    found = {}
    for heads, kv_heads, head_dim in HEADS:
        for sequences, queries, context in BATCHES:
            blocks = context // BLOCK_SIZE
            cache = torch.randn((sequences * blocks, 2, kv_heads, BLOCK_SIZE, head_dim)).bfloat16()
            block_table = torch.randperm(sequences * blocks).view(sequences, blocks).int()
            query = torch.randn((sequences * queries, heads, head_dim)).bfloat16()
            starts = list(range(0, sequences * queries + 1, queries))
            call = partial(attention, query, cache, block_table, starts, [context] * sequences, scale=head_dim**-0.5)
            pairs = sequences * (queries * (context - queries) + queries * (queries + 1) / 2)
            name = f"attention {heads}/{kv_heads}/{head_dim} bf16, {sequences} x {queries} of {context}"
            found[name] = Timing(median_us(call), cache.nbytes, 4 * heads * head_dim * pairs)
    return found


def cold_attention_times() -> dict[str, Timing]:
    """Time decode attention with cold caches: blocks hold all layers, and each call follows a read of other memory."""
    layers = 24
    (heads, kv_heads, head_dim) = HEADS[0]
    attention = registry.choose(CPU, torch.bfloat16, {head_dim}).paged_attention
    other_memory = torch.ones(1 << 24)
    found = {}
    for sequences, context in COLD_BATCHES:
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
        layer_calls = itertools.cycle(calls)
        name = f"attention {heads}/{kv_heads}/{head_dim} bf16, {sequences} x 1 of {context}, cold"
        pairs = sequences * context
        us = median_us(lambda layer_calls=layer_calls: next(layer_calls)(), before=other_memory.sum)
        found[name] = Timing(us, cache.nbytes // layers, 4 * heads * head_dim * pairs)
    return found


def row_times() -> dict[str, Timing]:
    """Time row kernels on decode and prefill sizes. Bytes are those read and written; arithmetic is not counted."""
    kernels = registry.choose(CPU, torch.bfloat16, {64})
    heads = 14
    kv_heads = 2
    head_dim = 64
    hidden_size = 896
    intermediate_size = 4864
    weight = torch.randn(hidden_size).bfloat16()
    cache = torch.zeros((64, 2, kv_heads, BLOCK_SIZE, head_dim)).bfloat16()
    found = {}
    for rows in (1, 32, 512):
        hidden = torch.randn((rows, hidden_size)).bfloat16()
        up = torch.randn((rows, 2 * intermediate_size)).bfloat16()
        qkv = torch.randn((rows, (heads + 2 * kv_heads) * head_dim)).bfloat16()
        angles = (torch.randn(rows, head_dim // 2), torch.randn(rows, head_dim // 2))
        slots = torch.randperm(512)[:rows]
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
            found[f"{name} bf16, {rows} rows"] = Timing(median_us(call), num_bytes, 0)
    return found


def delta_rule_times() -> dict[str, Timing]:
    """Time the gated delta rule of Qwen3-Next. Bytes are those of the states, read and written once for each token."""
    run = registry.choose(CPU, torch.bfloat16, {256}).gated_delta_rule
    key_heads = 16
    heads = 32
    size = 128
    channels = (2 * key_heads + heads) * size
    layer = DeltaRule(
        conv=torch.randn(4, channels).bfloat16(),
        decay=torch.randn(heads),
        decay_bias=torch.randn(heads),
        key_heads=torch.arange(heads) // 2,
        key_dim=size,
        value_dim=size,
    )
    found = {}
    for sequences, tokens in ((1, 1), (8, 1), (1, 512)):
        count = sequences * tokens
        qkv = torch.randn(count, channels).bfloat16()
        gates = torch.randn(count, 2 * heads).bfloat16()
        cache = torch.zeros(sequences, 3 * channels + heads * size * size)
        lengths = (list(range(0, count + 1, tokens)), [tokens + 1] * sequences)
        us = median_us(partial(run, qkv, gates, layer, cache, range(sequences), *lengths))
        num_bytes = 2 * 4 * count * heads * size * size
        found[f"gated delta rule bf16, {sequences} x {tokens}"] = Timing(us, num_bytes, count * heads * size * size * 8)
    return found


def measure_limits() -> tuple[float, float]:
    """Return the GB/s of memory and the GFLOP/s of a bfloat16 matrix product."""
    memory = torch.ones(1 << 27)
    bandwidth = memory.nbytes / median_us(partial(torch.sum, memory)) / 1000
    square = torch.randn((2048, 2048)).bfloat16()
    return bandwidth, 2 * 2048**3 / median_us(partial(torch.mm, square, square)) / 1000


def main() -> None:
    if torch.cuda.is_available():
        from serve_llm.kernels import bench_gpu

        bench_gpu.main()
        return
    bandwidth, peak = measure_limits()
    print(f"{torch.get_num_threads()} threads: memory {bandwidth:.0f} GB/s, bf16 matrix product {peak:.0f} GFLOP/s")
    times = linear_times() | grouped_times() | expert_times() | attention_times() | cold_attention_times() | row_times()
    times |= delta_rule_times()
    times |= sampling_times(lambda *shape: torch.randn(shape).bfloat16(), VOCABULARY, (1, 8, 32))
    report(times, bandwidth, peak)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
