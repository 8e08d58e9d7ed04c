"""Times of paged attention where `bench` does not measure: contexts of unequal length, a short chunk after a long
context, and a cache whose blocks hold all layers compared with a dense one. FlashAttention-3 (without paging, from
vLLM's wheel) is the reference for prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from floors import BEHIND, CONTEXT, LONG_CONTEXT, even, uneven
from torch import Tensor

from parts import common
from parts.attention import difference, on_device
from parts.flash_library import FlashLibrary
from serve_llm.kernels import bench_gpu, registry
from serve_llm.kernels.bench_gpu import BLOCK_SIZE, LLAMA_8B, Case
from serve_llm.kernels.registry import Kernels

Call = Callable[[], object]
LAYERS = 32


class Bench:
    """Attention in the shape of Llama 8B, on the device of a part."""

    def __init__(self, here: common.Place) -> None:
        self.here = here
        self.device = torch.device(here.device)
        self.heads, self.kv_heads, self.size = LLAMA_8B.heads, LLAMA_8B.kv_heads, LLAMA_8B.head_dim
        self.kernels: Kernels = registry.choose(self.device, torch.bfloat16, {self.size})
        self._generator = torch.Generator(self.device).manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.bfloat16)

    def micros(self, name: str, make: Callable[[], Call], num_bytes: int) -> float:
        """Return the microseconds of one call among others with their own tensors. num_bytes: read by a call."""
        if self.here.rehearse:
            return common.seconds(make(), repeats=1, warm=1) * 1e6
        return bench_gpu.graph_us(Case(name, make, num_bytes))

    def cached_bytes(self, tokens: int) -> int:
        return 4 * tokens * self.kv_heads * self.size

    def cache(self, num_blocks: int) -> Tensor:
        return self.random(num_blocks, 2, self.kv_heads, BLOCK_SIZE, self.size)

    def with_plan(self, call: partial[Tensor]) -> Call:
        """Return the call with the planning of a step, which otherwise only the first call does."""
        lengths = call.keywords["on_device"]
        return lambda: call(on_device=lengths.without_plans())

    def paged(self, cache: Tensor, new: int, contexts: Sequence[int]) -> partial[Tensor]:
        """Build a step with this many new tokens of each sequence. In decode, the host's list only has an upper bound,
        as in a captured step."""
        count = len(contexts)
        columns = -(-max(contexts) // BLOCK_SIZE)
        used = sum(-(-context // BLOCK_SIZE) for context in contexts)
        free = torch.randperm(used, device=self.device).int()
        block_table = torch.zeros((count, columns), dtype=torch.int32, device=self.device)
        ends = list(accumulate(-(-context // BLOCK_SIZE) for context in contexts))
        for row, (first, end) in enumerate(itertools.pairwise([0, *ends])):
            block_table[row, : end - first] = free[first:end]
        starts = list(range(0, count * new + 1, new))
        told = [max(contexts)] * count if new == 1 and not self.here.rehearse else list(contexts)
        return partial(
            self.kernels.paged_attention,
            self.random(count * new, self.heads, self.size),
            cache,
            block_table,
            starts,
            told,
            scale=self.size**-0.5,
            on_device=on_device(starts, contexts, self.device),
        )


def blocks_of(contexts: Sequence[int]) -> int:
    return sum(-(-context // BLOCK_SIZE) for context in contexts)


def unequal(bench: Bench) -> None:
    """Time one launch, as for one layer."""
    sized, report = bench.here.sized, bench.here.report
    contexts = uneven(sized(64, 3), sized(CONTEXT, 32), sized(LONG_CONTEXT, 200))
    micros = {}
    for name, lengths in (("equal", even(contexts)), ("unequal", contexts)):
        num_bytes = bench.cached_bytes(sum(lengths))
        micros[name] = bench.micros(
            name, lambda lengths=lengths: bench.paged(bench.cache(blocks_of(lengths)), 1, lengths), num_bytes
        )
        report.measured(f"decode, {name} contexts", micros[name], f"µs, {num_bytes / micros[name] / 1000:,.0f} GB/s")
    call = bench.paged(bench.cache(blocks_of(contexts)), 1, contexts)
    planned = bench.micros("planned", lambda: bench.with_plan(call), bench.cached_bytes(sum(contexts)))
    report.measured("decode, unequal contexts: planning, once per step", planned - micros["unequal"], "µs")
    report.measured("decode, unequal contexts over equal ones", micros["unequal"] / micros["equal"], aim=1.3)
    new, prefix = sized(BEHIND, 5), sized(LONG_CONTEXT, 200)
    num_bytes = bench.cached_bytes(prefix + new)
    took = bench.micros(
        "behind", lambda: bench.paged(bench.cache(blocks_of([prefix + new])), new, [prefix + new]), num_bytes
    )
    report.measured(f"{new} new tokens behind {prefix}", took, f"µs, {num_bytes / took / 1000:,.0f} GB/s")


def strided(bench: Bench) -> None:
    """Time decodes with a cache whose blocks hold all layers, as in engines, and with a cache of a single layer."""
    sized, report = bench.here.sized, bench.here.report
    contexts = [sized(CONTEXT, 32)] * sized(64, 2)
    count, layers = blocks_of(contexts), sized(LAYERS, 2)
    flat = torch.empty((count, layers, 2, bench.kv_heads, BLOCK_SIZE, bench.size), dtype=torch.bfloat16)
    flat = torch.empty_like(flat, device=bench.device)
    for layer in range(layers):  # float32 data of all layers at once would be large
        flat[:, layer] = bench.cache(count)
    turns = itertools.cycle(range(layers))
    num_bytes = bench.cached_bytes(sum(contexts))
    whole = bench.micros("strided", lambda: bench.paged(flat[:, next(turns)], 1, contexts), num_bytes)
    dense = bench.micros("dense", lambda: bench.paged(bench.cache(count), 1, contexts), num_bytes)
    report.measured("decode, blocks that hold all layers", whole, f"µs, {num_bytes / whole / 1000:,.0f} GB/s")
    report.measured("decode, a dense cache of one layer", dense, f"µs, {num_bytes / dense / 1000:,.0f} GB/s")
    report.measured("decode, all layers over dense", whole / dense, aim=1.05)


def flash_attention() -> Callable[..., Tensor] | str:
    """Return FlashAttention-3's function, or the reason why it is missing."""
    try:
        return FlashLibrary().attend
    except (ImportError, OSError, RuntimeError) as error:
        return f"vllm_fa3: {error!r:.150}"


def prompts(bench: Bench) -> None:
    """Compare ours on blocks with FlashAttention-3 on contiguous keys and values."""
    theirs = flash_attention()
    for count, tokens in [(1, 64)] if bench.here.rehearse else [(4, 2048), (1, 8192), (1, 32768)]:
        name = f"prompts, {count} x {tokens}"
        operations = 4 * bench.heads * bench.size * count * (tokens * (tokens + 1) / 2)
        num_bytes = bench.cached_bytes(count * tokens)
        contexts = [tokens] * count
        ours = bench.micros(name, lambda c=contexts: bench.paged(bench.cache(blocks_of(c)), c[0], c), num_bytes)
        bench.here.report.measured(name, ours, f"µs, {operations / ours / 1e6:,.0f} TFLOP/s")
        if isinstance(theirs, str) or bench.here.rehearse:
            bench.here.report.not_run(f"{name}: FlashAttention-3", theirs if isinstance(theirs, str) else "no GPU")
            continue

        def dense(count: int = count, tokens: int = tokens) -> Call:
            query = bench.random(count, tokens, bench.heads, bench.size)
            key, value = (bench.random(count, tokens, bench.kv_heads, bench.size) for _ in range(2))
            return partial(theirs, query, key, value, causal=True)  # type: ignore[arg-type]

        peer = bench.micros(name, dense, num_bytes)
        bench.here.report.measured(f"{name}: FlashAttention-3", peer, f"µs, {operations / peer / 1e6:,.0f} TFLOP/s")
        bench.here.report.measured(f"{name}: speed over FlashAttention-3", peer / ours)
    if not isinstance(theirs, str) and not bench.here.rehearse:
        agree(bench, theirs)


def agree(bench: Bench, flash: Callable[..., Tensor]) -> None:
    """Check that both compute the same; otherwise their times mean nothing."""
    tokens = 512
    cache = bench.cache(tokens // BLOCK_SIZE)
    query = bench.random(tokens, bench.heads, bench.size)
    key, value = (part.transpose(1, 2).flatten(0, 1) for part in cache.unbind(1))  # (tokens, kv_heads, head_dim)
    block_table = torch.arange(tokens // BLOCK_SIZE, device=bench.device, dtype=torch.int32)[None]
    lengths = on_device([0, tokens], [tokens], bench.device)
    how = {"scale": bench.size**-0.5, "on_device": lengths}
    ours = bench.kernels.paged_attention(query, cache, block_table, [0, tokens], [tokens], **how)
    theirs = flash(query[None], key[None], value[None], causal=True)
    found = difference(ours, theirs[0])
    bench.here.report.check("prompt of 512 as FlashAttention-3", found < 2e-2, f"{found:.1e}")


def measurements() -> Iterator[Callable[[Bench], None]]:
    yield from (unequal, strided, prompts)


@torch.inference_mode()
def main() -> None:
    here = common.place("attention_times")
    bench = Bench(here)
    for measure in measurements():
        try:
            measure(bench)
        except Exception as error:  # the next one may work
            here.report.check(measure.__name__, False, repr(error)[:200])


if __name__ == "__main__":
    main()
