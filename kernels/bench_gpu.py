"""Benchmark the GPU kernels against torch's equivalents: `python -m serve_llm.kernels.bench`.

Each time is that of one call among many in a CUDA graph, as in a decode step, so it includes launches but no Python.
Consecutive calls use different tensors, which together exceed the GPU's caches, so that weights, keys and values come
from memory. The result is the median over several replays. GB/s counts what must be read and written once, GFLOP/s is
as in `bench`; shares are of limits measured in the same run: a memory copy and a large bfloat16 matrix product.

The shapes are those of Llama 3 8B and of the experts of Qwen3 30B-A3B.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from serve_llm.kernels import linear_fp8, moe, registry
from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.timing import Random, Timing, report, sampling_times

Call = Callable[[], object]
BF16 = torch.bfloat16
CACHE_BYTES = 256 << 20  # exceeds the caches of any GPU
MAX_CALLS = 64  # calls captured in one graph
BLOCK_SIZE = 16
PAGE_SIZE = 256  # tokens; of torch's paged attention


@dataclass(frozen=True)
class BenchModel:
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


@dataclass(frozen=True)
class BenchExperts:
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True)
class Case:
    """A benchmarked call. make: returns a call with new tensors."""

    name: str
    make: Callable[[], Call]
    num_bytes: int
    operations: float = 0.0


def _torch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _torch_add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = hidden + delta
    return total, _torch_rms_norm(total, weight, eps)


def _torch_silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


TORCH = replace(
    registry.PORTABLE,
    rms_norm=_torch_rms_norm,
    add_rms_norm=_torch_add_rms_norm,
    activations={"silu_and_mul": _torch_silu_and_mul, "gelu": functional.gelu},
)
LLAMA_8B = BenchModel(4096, 14336, 32, 8, 128, 128256)
QWEN3_30B_A3B = BenchExperts(128, 8, 2048, 768)
ROWS = (1, 64, 256, 8192)
EXPERT_ROWS = (64, 1024, 8192)
BATCHES = ((1, 1, 1024), (64, 1, 1024), (256, 1, 1024), (1, 1, 32768), (1, 8192, 8192), (4, 512, 8192))
# sequences, new tokens of each, context length of each


def linear_cases(model: BenchModel, rows: tuple[int, ...], random: Random) -> Iterator[Case]:
    kernels = registry.choose(random(0).device, BF16, {model.head_dim})
    with_fp8 = linear_fp8.is_supported(random(0).device)
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    queries = model.heads * model.head_dim
    products = {
        "qkv": (qkv, model.hidden_size),
        "output": (model.hidden_size, queries),
        "up": (2 * model.intermediate_size, model.hidden_size),
        "down": (model.hidden_size, model.intermediate_size),
        "head": (model.vocabulary, model.hidden_size),
    }

    def bf16(outputs: int, inputs: int, count: int) -> Call:
        return partial(kernels.pack(random(outputs, inputs), None), random(count, inputs))

    def fp8(outputs: int, inputs: int, count: int) -> Call:
        weight, scale = linear_fp8.quantise_rows(random(outputs, inputs), inputs)
        return partial(kernels.pack_fp8(weight, scale, None), random(count, inputs))

    for name, (outputs, inputs) in products.items():
        for count in rows if name != "head" else rows[:-1]:
            activation_bytes = 2 * count * (inputs + outputs)
            for kind, make, weight_bytes in (("bf16", bf16, 2), ("fp8", fp8, 1))[: 1 + (with_fp8 and name != "head")]:
                num_bytes = weight_bytes * outputs * inputs + activation_bytes
                make_one = partial(make, outputs, inputs, count)
                yield Case(f"{name} {kind}, {count} rows", make_one, num_bytes, 2.0 * count * outputs * inputs)


def row_cases(model: BenchModel, rows: tuple[int, ...], random: Random) -> Iterator[Case]:
    versions = {"": registry.choose(random(0).device, BF16, {model.head_dim}), "torch ": TORCH}
    for count in rows:
        for version, kernels in versions.items():
            for name, (make, num_bytes) in row_calls(kernels, model, count, random).items():
                yield Case(f"{version}{name} bf16, {count} rows", make, num_bytes)


def row_calls(
    kernels: registry.Kernels, model: BenchModel, count: int, random: Random
) -> dict[str, tuple[Callable[[], Call], int]]:
    """Return for each kernel a function that makes a call with new tensors, and the bytes that a call moves."""
    hidden_size = model.hidden_size
    intermediate_size = model.intermediate_size
    heads = model.heads
    kv_heads = model.kv_heads
    size = model.head_dim
    all_heads = (heads + 2 * kv_heads) * size
    weight = random(hidden_size)
    row = 2 * count * hidden_size

    def rope() -> Call:
        cache = random(-(-count // BLOCK_SIZE), 2, kv_heads, BLOCK_SIZE, size)
        angles = (random(count, size // 2).float(), random(count, size // 2).float())
        slots = torch.randperm(cache.shape[0] * BLOCK_SIZE, device=cache.device)[:count]
        return partial(kernels.rope_and_cache, random(count, all_heads), heads, None, angles, cache, slots)

    return {
        "rms_norm": (lambda: partial(kernels.rms_norm, random(count, hidden_size), weight, 1e-6), 2 * row),
        "add_rms_norm": (
            lambda: partial(kernels.add_rms_norm, random(count, hidden_size), random(count, hidden_size), weight, 1e-6),
            4 * row,
        ),
        "layer_norm": (lambda: partial(kernels.layer_norm, random(count, hidden_size), weight, weight, 1e-6), 2 * row),
        "rope_and_cache": (rope, 4 * count * all_heads + 4 * count * size),
        "silu_and_mul": (
            lambda: partial(kernels.activations["silu_and_mul"], random(count, 2 * intermediate_size)),
            6 * count * intermediate_size,
        ),
        "gelu": (
            lambda: partial(kernels.activations["gelu"], random(count, intermediate_size)),
            4 * count * intermediate_size,
        ),
    }


def attention_cases(model: BenchModel, batches: tuple[tuple[int, int, int], ...], random: Random) -> Iterator[Case]:
    """Compare with torch's attention over contiguous keys and values and, from torch 2.12 on, over a block table."""
    heads = model.heads
    kv_heads = model.kv_heads
    size = model.head_dim
    scale = size**-0.5
    kernels = registry.choose(random(0).device, BF16, {size})

    def paged(sequences: int, queries: int, context: int) -> Call:
        blocks = -(-context // BLOCK_SIZE)
        cache = random(sequences * blocks, 2, kv_heads, BLOCK_SIZE, size)
        query = random(sequences * queries, heads, size)
        block_table = torch.randperm(sequences * blocks, device=cache.device).view(sequences, blocks).int()
        starts = list(range(0, sequences * queries + 1, queries))
        lengths = [context] * sequences
        on_device = Lengths(
            torch.tensor(starts, dtype=torch.int32, device=cache.device),
            torch.tensor(lengths, dtype=torch.int32, device=cache.device),
        )
        return partial(
            kernels.paged_attention, query, cache, block_table, starts, lengths, scale=scale, on_device=on_device
        )

    def dense(sequences: int, queries: int, context: int) -> Call:
        query = random(sequences, heads, queries, size)
        key, value = random(2, sequences, kv_heads, context, size)
        return partial(
            functional.scaled_dot_product_attention,
            query,
            key,
            value,
            is_causal=queries == context > 1,
            scale=scale,
            enable_gqa=heads != kv_heads,
        )

    def varlen(sequences: int, queries: int, context: int) -> Call:
        pages = -(-context // PAGE_SIZE)
        key, value = random(2, sequences * pages, PAGE_SIZE, kv_heads, size)
        return partial(
            varlen_attn,
            random(sequences * queries, heads, size),
            key,
            value,
            torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32, device=key.device),
            None,
            queries,
            context,
            scale=scale,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=torch.full((sequences,), context, dtype=torch.int32, device=key.device),
            block_table=torch.randperm(sequences * pages, device=key.device).view(sequences, pages).int(),
        )

    versions = {"": paged, "torch ": dense} | ({"torch paged ": varlen} if has_paged_varlen() else {})
    for sequences, queries, context in batches:
        tokens = sequences * queries
        pairs = sequences * (queries * (context - queries) + queries * (queries + 1) / 2)
        num_bytes = 4 * sequences * context * kv_heads * size + 4 * tokens * heads * size
        for version, make in versions.items():
            if make is not dense or queries in (1, context):  # torch's has no queries at the end of a context
                name = f"{version}attention {heads}/{kv_heads}/{size} bf16, {sequences} x {queries} of {context}"
                yield Case(name, partial(make, sequences, queries, context), num_bytes, 4 * heads * size * pairs)


def expert_cases(model: BenchExperts, rows: tuple[int, ...], random: Random) -> Iterator[Case]:
    """All experts of a layer: ours, and torch's grouped product, which needs rows copied into the experts' order."""
    kernels = registry.choose(random(0).device, BF16, {128})
    silu_and_mul = kernels.activations["silu_and_mul"]

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        scores, experts = random(count, model.num_experts).float().topk(model.top_k)
        up = random(model.num_experts, 2 * model.intermediate_size, model.hidden_size)
        down = random(model.num_experts, model.hidden_size, model.intermediate_size)
        return random(count, model.hidden_size), scores.softmax(-1), experts, up, down

    def ours(count: int) -> Call:
        x, weights, experts, up, down = draw(count)
        pairs = ((kernels.pack(one, None), kernels.pack(other, None)) for one, other in zip(up, down, strict=True))
        packed = kernels.pack_experts(pairs, silu_and_mul, range(model.num_experts))
        return partial(packed, x, weights, experts)

    def grouped(count: int) -> Call:
        return partial(_torch_experts, *draw(count), silu_and_mul)

    versions = {"": ours} | ({"torch grouped ": grouped} if has_grouped_mm() else {})
    for count in rows:
        num_hit = model.num_experts * (1 - (1 - model.top_k / model.num_experts) ** count)
        num_weights = 3 * model.hidden_size * model.intermediate_size  # in an expert
        num_bytes = round(2 * num_hit * num_weights) + 4 * count * model.hidden_size
        sizes = f"{model.top_k} of {model.num_experts}, {model.hidden_size} x {model.intermediate_size}"
        for version, make in versions.items():
            name = f"{version}experts {sizes} bf16, {count} rows"
            yield Case(name, partial(make, count), num_bytes, 2.0 * count * model.top_k * num_weights)


def _torch_experts(
    x: Tensor, weights: Tensor, experts: Tensor, up: Tensor, down: Tensor, activation: moe.Activation
) -> Tensor:
    """See `moe.Experts`. up, down: (experts, outputs, inputs)."""
    tokens, top_k = experts.shape
    sorted_experts, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_experts, torch.arange(1, len(up) + 1, device=x.device), out_int32=True)
    inner = activation(functional.grouped_mm(x[order // top_k], up.transpose(1, 2), offs=ends))
    outputs = x.new_empty((tokens * top_k, x.shape[1]))
    outputs[order] = functional.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    return moe.weighted_sum(outputs.view(tokens, top_k, -1), weights)


def has_grouped_mm() -> bool:
    """Return whether this torch has a kernel for grouped products: other GPUs would compute them one by one."""
    capable = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in (9, 10)
    return hasattr(functional, "grouped_mm") and capable


def has_paged_varlen() -> bool:
    """Return whether this torch has attention over a block table, which needs a GPU."""
    return torch.cuda.is_available() and "block_table" in inspect.signature(varlen_attn).parameters


def graph_us(case: Case) -> float:
    """Return the microseconds of one call, the median over replays of a graph of calls."""
    calls = [case.make() for _ in range(min(max(2 * CACHE_BYTES // case.num_bytes, 4), MAX_CALLS))]
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for call in calls:  # attention plans in the first call of each, which a model makes once per step
            call()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    while len(times) < 9 or sum(times) < 50.0:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:]) * 1000 / len(calls)


def measure_limits(random: Random) -> tuple[float, float]:
    """Return the GB/s of a memory copy and the GFLOP/s of a bfloat16 matrix product."""
    source = random(1 << 30)
    square = random(8192, 8192)
    copied = Case("copy", lambda: partial(torch.empty_like(source).copy_, source), 4 << 30)
    product = Case("product", lambda: partial(torch.mm, square, square), 1 << 30)
    return copied.num_bytes / graph_us(copied) / 1000, 2 * 8192**3 / graph_us(product) / 1000


def make_random(device: str = "cuda") -> Random:
    """Return normal numbers in bfloat16."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=BF16)

    return random


def measure_times(random: Random) -> Iterator[tuple[str, Timing]]:
    """Yield the times of all cases by name, measured one after the other."""
    cases = (
        linear_cases(LLAMA_8B, ROWS, random),
        attention_cases(LLAMA_8B, BATCHES, random),
        row_cases(LLAMA_8B, ROWS, random),
        expert_cases(QWEN3_30B_A3B, EXPERT_ROWS, random),
    )
    for case in chain.from_iterable(cases):
        yield case.name, Timing(graph_us(case), case.num_bytes, case.operations)
    yield from sampling_times(random, LLAMA_8B.vocabulary, (1, 64)).items()


@torch.inference_mode()
def main() -> None:
    random = make_random()
    bandwidth, peak = measure_limits(random)
    print(f"{torch.cuda.get_device_name()}: memory {bandwidth:.0f} GB/s, bf16 matrix product {peak:.0f} GFLOP/s")
    report(dict(measure_times(random)), bandwidth, peak)
