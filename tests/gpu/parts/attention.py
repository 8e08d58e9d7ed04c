"""Paged attention on the card at the shapes of models, against a dense computation in float32: prompts, decodes and
mixed steps, windows, sinks, latent rows; a captured launch; and rows that do not depend on each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from serve_llm.engine.worker.graphs import CudaCapture
from serve_llm.engine.worker.memory import FP8_CACHE_CAPABILITIES
from serve_llm.kernels import cache_fp8
from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.backends import flash_attention
from serve_llm.kernels.backends.backend import AttentionForm, BackendRequirements, Offer
from serve_llm.kernels.registry import Kernels

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-5}  # relative to each row's norm
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    name: str
    heads: tuple[int, int, int]  # heads, kv_heads, head_dim
    sequences: tuple[tuple[int, int], ...]  # new tokens and context length of each
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    value_dim: int | None = None
    dtype: torch.dtype = torch.bfloat16
    has_fp8_cache: bool = False


def several(count: int, most: int) -> tuple[tuple[int, int], ...]:
    """Return decodes with random contexts."""
    rng = random.Random(count)
    return tuple((1, rng.randint(1, most)) for _ in range(count))


MIXED = ((1, 1), (700, 700), (1, 3000), (33, 1000), (1, 129), (5, 4097))
LLAMA, QWEN, GEMMA, OSS = (32, 8, 128), (14, 2, 64), (8, 4, 256), (64, 8, 64)
LATENT = (16, 1, 576)
CASES = [
    Case("Llama 8B, decode, 64 sequences", LLAMA, several(64, 2000)),
    Case("Llama 8B, decode, 1 of 32k", LLAMA, ((1, 32768),)),
    Case("Llama 8B, decode, 256 sequences", LLAMA, several(256, 600)),
    Case("Llama 8B, prompt of 2048", LLAMA, ((2048, 2048),)),
    Case("Llama 8B, 4 chunks of 512 up to 8192", LLAMA, ((512, 8192), (512, 513), (512, 4000), (512, 512))),
    Case("Llama 8B, one long context among short ones", LLAMA, ((1, 30000), *several(30, 800))),
    Case("Llama 8B, a chunk behind a long prefix", LLAMA, ((100, 30100),)),
    Case("Llama 8B, mixed", LLAMA, MIXED),
    Case("Llama 8B, mixed, float16", LLAMA, MIXED[:4], dtype=torch.float16),
    Case("Llama 8B, mixed, float32", LLAMA, MIXED[:4], dtype=torch.float32),
    Case("Qwen 0.5B, mixed", QWEN, MIXED),
    Case("Gemma 2, window and softcap, mixed", GEMMA, MIXED, window=1024, softcap=50.0),
    Case("gpt-oss, window and sinks, mixed", OSS, MIXED, window=128, has_sinks=True),
    Case("BLOOM 7B, ALiBi, mixed", (32, 32, 128), MIXED, has_alibi=True),
    Case("odd heads, mixed", (6, 3, 14), MIXED[:4]),
    Case("Llama 8B, cache in fp8, mixed", LLAMA, MIXED, has_fp8_cache=True),
    Case("latent rows of 576, cache in fp8, mixed", LATENT, MIXED[:4], value_dim=512, has_fp8_cache=True),
    Case("latent rows of 576, decode", LATENT, several(16, 2000), value_dim=512),
    Case("latent rows of 576, mixed", LATENT, MIXED[:4], value_dim=512),
]
TINY = ((1, 1), (7, 9), (1, 40))
TINY_CASES = [
    Case("tiny", (4, 2, 16), TINY),
    Case("tiny, window and softcap", (4, 2, 16), TINY, window=8, softcap=50.0),
    Case("tiny, ALiBi", (4, 2, 16), TINY, has_alibi=True),
    Case("tiny, cache in fp8", (4, 2, 16), TINY, has_fp8_cache=True),
    Case("tiny, latent", (4, 1, 24), TINY, value_dim=16),
]


@dataclass
class Step:
    """A case with data, in a cache that is NaN outside of the sequences."""

    case: Case
    device: torch.device
    seed: int = 0
    query: Tensor = field(init=False)
    cache: Tensor = field(init=False)
    stored: Tensor = field(init=False)  # the same data as the kernels get it
    table: Tensor = field(init=False)
    sinks: Tensor | None = field(init=False)
    alibi_slopes: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        heads, kv_heads, size = self.case.heads
        generator = torch.Generator(self.device).manual_seed(self.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=self.device).to(self.case.dtype)

        counts, contexts = zip(*self.case.sequences, strict=True)
        self.query = draw(sum(counts), heads, size) * 2
        columns = -(-max(contexts) // BLOCK_SIZE)
        free = torch.randperm(len(counts) * columns, generator=generator, device=self.device)
        self.table = free.view(len(counts), columns).int()
        parts = 2 if self.case.value_dim is None else 1
        shape = (len(free), parts, kv_heads, BLOCK_SIZE, size)
        self.cache = torch.full(shape, torch.nan, dtype=self.case.dtype, device=self.device)
        for row, context in enumerate(contexts):
            slots = self.slots(row, context)
            self.cache[slots // BLOCK_SIZE, :, :, slots % BLOCK_SIZE] = draw(context, parts, kv_heads, size)
        self.stored = self.cache
        if self.case.has_fp8_cache:
            self.stored = cache_fp8.quantise(self.cache)
            self.cache = self.stored.to(self.case.dtype)
        self.sinks = draw(heads).float() if self.case.has_sinks else None
        exponents = torch.linspace(8, 0.25, heads, device=self.device)
        self.alibi_slopes = 2.0**-exponents if self.case.has_alibi else None

    def slots(self, row: int, context: int) -> Tensor:
        positions = torch.arange(context, device=self.device)
        return self.table[row].long()[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE

    @property
    def how(self) -> dict[str, Any]:
        case = self.case
        return {
            "scale": case.heads[2] ** -0.5,
            "window": case.window,
            "softcap": case.softcap,
            "sinks": self.sinks,
            "alibi_slopes": self.alibi_slopes,
            "value_dim": case.value_dim,
        }

    def run(self, paged_attention: Callable[..., Tensor], rows: slice = slice(None)) -> Tensor:
        """Run the kernel. rows: those of the sequences."""
        counts, contexts = zip(*self.case.sequences[rows], strict=True)
        starts = [0, *accumulate(counts)]
        first = sum(count for count, _ in self.case.sequences[: rows.start or 0])
        lengths = on_device(starts, contexts, self.device)
        query, table = self.query[first : first + starts[-1]], self.table[rows]
        arguments = (query, self.stored, table, starts, list(contexts))
        return paged_attention(*arguments, on_device=lengths, **self.how)

    def wanted(self) -> Tensor:
        """Return the dense result for each sequence: (tokens, heads, value_dim) float32."""
        heads, kv_heads, size = self.case.heads
        starts = [0, *accumulate(count for count, _ in self.case.sequences)]
        outputs = []
        for row, (first, end) in enumerate(pairwise(starts)):
            context = self.case.sequences[row][1]
            slots = self.slots(row, context)
            found = self.cache[
                slots // BLOCK_SIZE, :, :, slots % BLOCK_SIZE
            ].float()  # (context, parts, kv_heads, size)
            keys, values = (found[:, part].repeat_interleave(heads // kv_heads, 1) for part in (0, -1))
            scores = torch.einsum("qhd,khd->hqk", self.query[first:end].float(), keys) * size**-0.5
            if self.case.softcap is not None:
                scores = self.case.softcap * (scores / self.case.softcap).tanh()
            at = torch.arange(context - (end - first), context, device=self.device)[:, None]
            key = torch.arange(context, device=self.device)
            if self.alibi_slopes is not None:
                scores = scores + self.alibi_slopes[:, None, None] * (key - at)
            seen = (key <= at) & (key > at - (self.case.window or context + 1))
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks[:, None, None].expand(-1, end - first, 1)), -1)
            weights = scores.softmax(-1)[..., :context]
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values[..., : self.case.value_dim]))
        return torch.cat(outputs)


def on_device(starts: Sequence[int], contexts: Sequence[int], device: torch.device) -> Lengths:
    return Lengths(*(torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (starts, contexts)))


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of any row, relative to the expected row; infinite if something is not a number."""
    wide = wanted.float()
    norms = wide.norm(dim=-1).clamp(min=1e-3 * float(wide.norm(dim=-1).max()))
    worst = ((found.float() - wide).norm(dim=-1) / norms).max()
    return float(worst) if bool(worst.isfinite()) else float("inf")


def captured(kernels: Kernels, device: torch.device, step: Step) -> float:
    """Return the difference when decodes are captured for the longest contexts and then replayed with the step's; one
    row is padding."""
    count, longest = len(step.case.sequences), step.table.shape[1] * BLOCK_SIZE
    starts, contexts = list(range(count + 2)), [longest] * (count + 1)
    lengths = on_device(starts, [1] * (count + 1), device)
    query, table = torch.cat((step.query, step.query[:1])), torch.cat((step.table, step.table[:1]))

    def attend() -> Tensor:
        arguments = (query, step.stored, table, starts, contexts)
        return kernels.paged_attention(*arguments, on_device=lengths.without_plans(), **step.how)

    attend()
    graph = CudaCapture(device)(attend)
    lengths.context_lens.copy_(torch.tensor([*(context for _, context in step.case.sequences), 0]))
    graph.replay()
    torch.cuda.synchronize()
    assert not graph.output[-1].any(), "a row that stands for nothing is not 0"
    return difference(graph.output[:-1], step.wanted())


def alone(kernels: Kernels, step: Step) -> bool:
    """Return whether each sequence has the same bits alone as in the batch."""
    together, first = step.run(kernels.paged_attention), 0
    for row, (count, _) in enumerate(step.case.sequences):
        if not torch.equal(step.run(kernels.paged_attention, slice(row, row + 1)), together[first : first + count]):
            return False
        first += count
    return True


def flash_offer(device: torch.device, case: Case) -> Offer:
    """Return FlashAttention-3's offer for a case on this card, or the reason for its refusal."""
    form = AttentionForm(
        case.heads[2],
        case.value_dim,
        has_window=case.window is not None,
        has_softcap=case.softcap is not None,
        has_sinks=case.has_sinks,
        has_alibi=case.has_alibi,
    )
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    cache_dtype = cache_fp8.DTYPE if case.has_fp8_cache else case.dtype
    return flash_attention.offer(BackendRequirements(device, case.dtype, capability, {form}, cache_dtype=cache_dtype))


def flash_checks(device: torch.device, cases: Sequence[Case]) -> Iterator[tuple[str, Callable[[], float], float]]:
    """Yield the cases that FlashAttention-3 offers on this card; see `checks`."""

    def compared(paged_attention: Callable[..., Tensor], case: Case) -> float:
        step = Step(case, device)
        step.stored.nan_to_num_(0.0)  # it multiplies masked values by 0
        return difference(step.run(paged_attention), step.wanted())

    for case in cases:
        offer = flash_offer(device, case)
        if not isinstance(offer, str):
            call = partial(compared, offer["paged_attention"], case)
            yield f"FlashAttention-3, {case.name}", call, TOLERANCE[case.dtype]


def checks(
    choose: Callable[..., Kernels], device: torch.device, rehearse: bool
) -> Iterator[tuple[str, Callable[[], float], float]]:
    """Yield names, a function that returns the difference, and its limit."""
    kernels, invariant = choose(), choose(batch_invariant=True)

    def compared(version: Kernels, case: Case) -> float:
        step = Step(case, device)
        return difference(step.run(version.paged_attention), step.wanted())

    has_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) in FP8_CACHE_CAPABILITIES
    for case in TINY_CASES if rehearse else CASES:
        if case.has_fp8_cache and not has_fp8:
            continue
        yield case.name, partial(compared, kernels, case), TOLERANCE[case.dtype]
    yield from flash_checks(device, TINY_CASES if rehearse else CASES)
    mixed = next(case for case in (TINY_CASES if rehearse else CASES) if case.sequences in (TINY, MIXED))
    yield "--batch-invariant, mixed", partial(compared, invariant, mixed), TOLERANCE[mixed.dtype]
    yield "--batch-invariant, rows alone", lambda: float(not alone(invariant, Step(mixed, device))), 0.5
    for case in () if rehearse else CASES[:2]:
        call = partial(captured, kernels, device, Step(case, device))
        yield f"captured for longer contexts, {case.name}", call, TOLERANCE[case.dtype]
