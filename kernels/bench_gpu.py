"""Times the kernels of a GPU and, beside them, what torch has for the same: `python -m serve_llm.kernels.bench`.

Each time is that of one call among many in a CUDA graph, as in a step of decoding: launches cost what they cost there,
and Python nothing. Calls that follow each other work on different tensors, together more than the GPU's caches hold,
so that weights, keys and values come from memory; only what is small is found in the caches, as it is in a model. Of
several replays the median is taken. GB/s count what must be read and written once, GFLOP/s as in `bench`, with shares
of what was measured in the same run: a copy of memory, and a large bfloat16 matrix product.

The shapes are those of Llama 3 8B. Not run on a GPU yet.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from serve_llm.kernels import linear_fp8, table
from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.bench import DRAWS, Timed, report

Call = Callable[[], object]
Random = Callable[..., Tensor]  # bfloat16 of any shape, on the device that is measured
BF16 = torch.bfloat16
CACHES = 256 << 20  # bytes beyond any GPU's caches
MOST_CALLS = 64  # in a graph
BLOCK_SIZE = 16
PAGE_SIZE = 256  # of torch's attention, in tokens


@dataclass(frozen=True)
class Model:
    width: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


@dataclass(frozen=True)
class Case:
    """make: a call with tensors of its own."""

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
    table.PORTABLE,
    rms_norm=_torch_rms_norm,
    add_rms_norm=_torch_add_rms_norm,
    activations={"silu_and_mul": _torch_silu_and_mul, "gelu": functional.gelu},
)
LLAMA_8B = Model(4096, 14336, 32, 8, 128, 128256)
ROWS = (1, 64, 256, 8192)
STEPS = ((1, 1, 1024), (64, 1, 1024), (256, 1, 1024), (1, 1, 32768), (1, 8192, 8192), (4, 512, 8192))
# sequences, new tokens of each, context of each


def linear_cases(model: Model, rows: tuple[int, ...], random: Random) -> Iterator[Case]:
    kernels = table.choose(random(0).device, BF16, {model.head_dim})
    with_fp8 = linear_fp8.works(random(0).device)
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    queries = model.heads * model.head_dim
    products = {
        "qkv": (qkv, model.width),
        "output": (model.width, queries),
        "up": (2 * model.inner, model.width),
        "down": (model.width, model.inner),
        "head": (model.vocabulary, model.width),
    }

    def bf16(outputs: int, inputs: int, count: int) -> Call:
        return partial(kernels.pack(random(outputs, inputs), None), random(count, inputs))

    def fp8(outputs: int, inputs: int, count: int) -> Call:
        weight, scale = linear_fp8.quantise_rows(random(outputs, inputs), inputs)
        return partial(kernels.pack_fp8(weight, scale, None), random(count, inputs))

    for name, (outputs, inputs) in products.items():
        for count in rows if name != "head" else rows[:-1]:
            made = 2 * count * (inputs + outputs)
            for kind, make, weight_bytes in (("bf16", bf16, 2), ("fp8", fp8, 1))[: 1 + (with_fp8 and name != "head")]:
                num_bytes = weight_bytes * outputs * inputs + made
                make_one = partial(make, outputs, inputs, count)
                yield Case(f"{name} {kind}, {count} rows", make_one, num_bytes, 2.0 * count * outputs * inputs)


def row_cases(model: Model, rows: tuple[int, ...], random: Random) -> Iterator[Case]:
    versions = {"": table.choose(random(0).device, BF16, {model.head_dim}), "torch ": TORCH}
    for count in rows:
        for version, kernels in versions.items():
            for name, (make, num_bytes) in row_calls(kernels, model, count, random).items():
                yield Case(f"{version}{name} bf16, {count} rows", make, num_bytes)


def row_calls(
    kernels: table.Kernels, model: Model, count: int, random: Random
) -> dict[str, tuple[Callable[[], Call], int]]:
    """Each kernel's call with new tensors, and the bytes that it reads and writes."""
    width, inner, heads, kv_heads, size = model.width, model.inner, model.heads, model.kv_heads, model.head_dim
    weight, all_heads = random(width), (heads + 2 * kv_heads) * size
    row = 2 * count * width

    def rope() -> Call:
        cache = random(-(-count // BLOCK_SIZE), 2, kv_heads, BLOCK_SIZE, size)
        angles = (random(count, size // 2).float(), random(count, size // 2).float())
        slots = torch.randperm(cache.shape[0] * BLOCK_SIZE, device=cache.device)[:count]
        return partial(kernels.rope_and_cache, random(count, all_heads), heads, None, angles, cache, slots)

    return {
        "rms_norm": (lambda: partial(kernels.rms_norm, random(count, width), weight, 1e-6), 2 * row),
        "add_rms_norm": (
            lambda: partial(kernels.add_rms_norm, random(count, width), random(count, width), weight, 1e-6),
            4 * row,
        ),
        "layer_norm": (lambda: partial(kernels.layer_norm, random(count, width), weight, weight, 1e-6), 2 * row),
        "rope_and_cache": (rope, 4 * count * all_heads + 4 * count * size),
        "silu_and_mul": (
            lambda: partial(kernels.activations["silu_and_mul"], random(count, 2 * inner)),
            6 * count * inner,
        ),
        "gelu": (lambda: partial(kernels.activations["gelu"], random(count, inner)), 4 * count * inner),
    }


def attention_cases(model: Model, steps: tuple[tuple[int, int, int], ...], random: Random) -> Iterator[Case]:
    """Beside ours, which finds keys and values by a block table, torch's own: one that has them side by side, and,
    from torch 2.12 on, one with a block table."""
    heads, kv_heads, size, scale = model.heads, model.kv_heads, model.head_dim, model.head_dim**-0.5
    kernels = table.choose(random(0).device, BF16, {size})

    def paged(sequences: int, queries: int, context: int) -> Call:
        blocks = -(-context // BLOCK_SIZE)
        cache, query = (
            random(sequences * blocks, 2, kv_heads, BLOCK_SIZE, size),
            random(sequences * queries, heads, size),
        )
        block_table = torch.randperm(sequences * blocks, device=cache.device).view(sequences, blocks).int()
        starts, lengths = [*range(0, sequences * queries + 1, queries)], [context] * sequences
        on_device = Lengths(*(torch.tensor(each, dtype=torch.int32, device=cache.device) for each in (starts, lengths)))
        where = (query, cache, block_table, starts, lengths)
        return partial(kernels.paged_attention, *where, scale=scale, on_device=on_device)

    def dense(sequences: int, queries: int, context: int) -> Call:
        query = random(sequences, heads, queries, size)
        key, value = random(2, sequences, kv_heads, context, size)
        attend, grouped = functional.scaled_dot_product_attention, heads != kv_heads
        return partial(attend, query, key, value, is_causal=queries == context > 1, scale=scale, enable_gqa=grouped)

    def varlen(sequences: int, queries: int, context: int) -> Call:
        pages = -(-context // PAGE_SIZE)
        key, value = random(2, sequences * pages, PAGE_SIZE, kv_heads, size)
        starts, lengths, block_table = (
            numbers.to(key.device, torch.int32)
            for numbers in (
                torch.arange(0, sequences * queries + 1, queries),
                torch.full((sequences,), context),
                torch.randperm(sequences * pages).view(sequences, pages),
            )
        )
        where = (random(sequences * queries, heads, size), key, value, starts, None, queries, context)
        how = {"scale": scale, "window_size": (-1, 0), "enable_gqa": True}
        return partial(varlen_attn, *where, **how, seqused_k=lengths, block_table=block_table)

    versions = {"": paged, "torch ": dense} | ({"torch paged ": varlen} if has_paged_varlen() else {})
    for sequences, queries, context in steps:
        tokens = sequences * queries
        pairs = sequences * (queries * (context - queries) + queries * (queries + 1) / 2)
        num_bytes = 4 * sequences * context * kv_heads * size + 4 * tokens * heads * size
        for version, make in versions.items():
            if make is not dense or queries in (1, context):  # that knows no queries at the end of a context
                name = f"{version}attention {heads}/{kv_heads}/{size} bf16, {sequences} x {queries} of {context}"
                yield Case(name, partial(make, sequences, queries, context), num_bytes, 4 * heads * size * pairs)


def has_paged_varlen() -> bool:
    """Whether this torch has attention over a block table on this machine; it is made for GPUs alone."""
    return torch.cuda.is_available() and "block_table" in inspect.signature(varlen_attn).parameters


def graph_us(case: Case) -> float:
    """The median over replays of a graph of calls, of one call."""
    calls = [case.make() for _ in range(min(max(2 * CACHES // case.num_bytes, 4), MOST_CALLS))]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:2]:  # what is compiled or set up at first
            call()
    torch.cuda.current_stream().wait_stream(side)
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


def host_us(call: Call) -> float:
    """Of calls that wait for their results."""
    times = []
    for _ in range(12):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1e6


def sampling_times(random: Random, vocabulary: int) -> dict[str, Timed]:
    kernels = table.choose_sampling(random(0).device)
    found = {}
    for rows in (1, 64):
        logits = random(rows, vocabulary)
        for name, draw in DRAWS.items():
            us = host_us(partial(kernels.choose, logits, [draw] * rows))
            found[f"sampling {vocabulary} bf16, {rows} rows, {name}"] = Timed(us, logits.nbytes, 0.0)
    return found


def limits(random: Random) -> tuple[float, float]:
    """GB/s of memory, GFLOP/s of a bfloat16 matrix product."""
    source, square = random(1 << 30), random(8192, 8192)
    copied = Case("copy", lambda: partial(torch.empty_like(source).copy_, source), 4 << 30)
    product = Case("product", lambda: partial(torch.mm, square, square), 1 << 30)
    return copied.num_bytes / graph_us(copied) / 1000, 2 * 8192**3 / graph_us(product) / 1000


def numbers() -> Random:
    """On the first GPU."""
    generator = torch.Generator("cuda").manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device="cuda", dtype=BF16)


def times(random: Random) -> Iterator[tuple[str, Timed]]:
    """Of all cases, each as soon as it is known."""
    for case in (
        *linear_cases(LLAMA_8B, ROWS, random),
        *attention_cases(LLAMA_8B, STEPS, random),
        *row_cases(LLAMA_8B, ROWS, random),
    ):
        yield case.name, Timed(graph_us(case), case.num_bytes, case.operations)
    yield from sampling_times(random, LLAMA_8B.vocabulary).items()


@torch.inference_mode()
def main() -> None:
    random = numbers()
    bandwidth, peak = limits(random)
    print(f"{torch.cuda.get_device_name()}: memory {bandwidth:.0f} GB/s, bf16 matrix product {peak:.0f} GFLOP/s")
    report(dict(times(random)), bandwidth, peak)
