"""Paged attention in Triton: equal to the definition in the interpreter, and compiled for GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import attention as definition
from serve_llm.kernels import attention, cache_fp8
from serve_llm.kernels.attention import Lengths
from support.matrix import mostly_long, mostly_slow
from support.triton import NO_TRITON, Resources, assert_fits, compile_for, record

pytest.importorskip("triton", reason=NO_TRITON)
from serve_llm.kernels.triton import attention as ours

Shape = tuple[int, int, int, int | None, int]  # heads, kv_heads, head_dim, value_dim, block_size
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Step:
    """Sequences with these numbers of new tokens and total lengths, in a cache that is NaN outside of the visible
    keys."""

    shape: Shape
    dtype: torch.dtype
    counts: list[int]
    contexts: list[int]
    window: int | None = None
    how: dict[str, Any] = field(default_factory=dict)  # more arguments
    seed: int = 0
    query: Tensor = field(init=False)
    cache: Tensor = field(init=False)
    table: Tensor = field(init=False)
    starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        heads, kv_heads, head_dim, value_dim, block_size = self.shape
        generator, rng = torch.Generator().manual_seed(self.seed), random.Random(self.seed)
        self.starts = [sum(self.counts[:n]) for n in range(len(self.counts) + 1)]
        qkv = torch.randn((self.starts[-1], heads + 3, head_dim), generator=generator)
        self.query = (qkv * 2).to(self.dtype)[:, 2:-1]
        columns = max(-(-context // block_size) for context in self.contexts)
        blocks = columns * len(self.counts) + 1
        inner = (1 if value_dim else 2) * kv_heads * block_size * head_dim
        flat = torch.full((blocks, inner + 16), torch.nan, dtype=self.dtype)
        self.cache = flat[:, 8:-8].unflatten(1, (-1, kv_heads, block_size, head_dim))
        self.table = torch.zeros((len(self.counts), columns + 1), dtype=torch.int32)[:, :-1]  # block 0 stays NaN
        free = rng.sample(range(1, blocks), blocks - 1)
        for row, (count, context) in enumerate(zip(self.counts, self.contexts, strict=True)):
            first = 0 if self.window is None else max(0, context - count - self.window + 1)
            numbers = torch.randn((2, kv_heads, context, head_dim), generator=generator).to(self.dtype)
            for column in range(first // block_size, -(-context // block_size)):
                self.table[row, column] = block = free.pop()
                low, high = max(first, column * block_size), min(context, (column + 1) * block_size)
                seen = slice(low % block_size, (high - 1) % block_size + 1)
                self.cache[block, :, :, seen] = numbers[: self.cache.shape[1], :, low:high]

    def run(self, kernels: Any, rows: slice = slice(None), **more: Any) -> Tensor:
        """Run the kernel. rows: those of the sequences."""
        first, counts = self.starts[rows][0], self.counts[rows]
        starts = [sum(counts[:n]) for n in range(len(counts) + 1)]
        return kernels.paged_attention(
            self.query[first : first + starts[-1]],
            self.cache,
            self.table[rows],
            *(starts, self.contexts[rows]),
            scale=self.shape[2] ** -0.5,
            window=self.window,
            value_dim=self.shape[3],
            **{"on_device": lengths(starts, self.contexts[rows])} | self.how,
            **more,
        )

    def assert_correct(self, result: Tensor) -> None:
        tolerance = {
            torch.float32: {"atol": 2e-6, "rtol": 1e-5},
            torch.float16: {"atol": 2e-3, "rtol": 2**-9},
            torch.bfloat16: {"atol": 1.6e-2, "rtol": 2**-7},
        }
        torch.testing.assert_close(result, self.run(definition), **tolerance[self.dtype])


def lengths(starts: list[int], contexts: list[int]) -> Lengths:
    return Lengths(torch.tensor(starts, dtype=torch.int32), torch.tensor(contexts, dtype=torch.int32))


def random_step(seed: int, single: bool) -> Step:
    """Return a random step. single: decode, with contexts of up to 11 tiles of keys; else prefill chunks with decodes
    between them."""
    rng = random.Random(seed)
    kv_heads, block_size = rng.choice([1, 2]), rng.choice([8, 16, 64])
    heads = kv_heads * rng.choice([1, 2, 3, 7])
    head_dim, value_dim = rng.choice([(16, None), (24, None), (64, None), (80, None), (48, 32), (96, 64), (32, 32)])
    counts = [1 if single or rng.random() < 0.4 else rng.randint(2, 50) for _ in range(rng.randint(1, 3))]
    contexts = [
        count + rng.choice([0, rng.randint(0, 200), rng.randint(0, 640 if single else 200)]) for count in counts
    ]
    window = rng.choice([None, None, 1, 19, 130])
    how: dict[str, Any] = {"softcap": 5.0} if rng.random() < 0.4 else {}
    if rng.random() < 0.4:
        how["sinks"] = torch.linspace(-8, 8, heads)  # far below all scores and far above
    if value_dim is None and rng.random() < 0.4:
        how["alibi_slopes"] = torch.logspace(-6, 0, heads, base=2.0)
    shape = (heads, kv_heads if value_dim is None else 1, head_dim, value_dim, block_size)
    return Step(shape, rng.choice(DTYPES), counts, contexts, window, how, seed)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("seed", mostly_slow(range(6), [0, 1, 4]))
def test_equals_the_definition(seed: int, single: bool) -> None:
    step = random_step(seed, single)
    step.assert_correct(step.run(ours))
    if seed < 3:
        step.assert_correct(step.run(ours, batch_invariant=True))


@pytest.mark.parametrize(
    "shape",
    [
        (4, 4, 128, None, 16),
        (8, 1, 256, None, 256),
        (20, 1, 128, None, 16),
        pytest.param((70, 1, 576, 512, 64), marks=pytest.mark.slow),
    ],
)
def test_shapes_of_published_models(shape: Shape) -> None:
    step = Step(shape, torch.bfloat16, [3, 1], [40, 90])
    step.assert_correct(step.run(ours))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("waves", [0, 2])  # one program for all keys, or splits of them
def test_a_captured_launch_serves_shorter_contexts(
    batch_invariant: bool, waves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "PROGRAMS_PER_MULTIPROCESSOR", waves)
    step = Step((4, 2, 32, None, 16), torch.bfloat16, [1] * 4, [5, 600, 64, 513])
    result = ours.paged_attention(
        *(step.query, step.cache, torch.cat([step.table, step.table.flip(0)], 1), range(5), [1200] * 4),
        scale=32**-0.5,
        on_device=lengths(step.starts, [5, 600, 0, 513]),
        batch_invariant=batch_invariant,
    )
    assert result[2].eq(0).all()
    result[2] = step.run(definition)[2]
    step.assert_correct(result)


@pytest.mark.parametrize("batch_invariant", mostly_slow([False, True], [True]))
@pytest.mark.parametrize("shape", [(4, 2, 32, None, 16), (3, 1, 48, 32, 16)])
def test_chunks_behind_long_contexts_are_split(shape: Shape, batch_invariant: bool) -> None:
    how: dict[str, Any] = {"sinks": torch.linspace(-2, 2, shape[0])}
    step = Step(shape, torch.bfloat16, [5, 1, 70], [900, 1300, 75], how=how)
    step.how["on_device"] = on_device = lengths(step.starts, step.contexts)
    step.assert_correct(step.run(ours, batch_invariant=batch_invariant))
    (launches,) = on_device.plans.values()
    assert all(launch.items[:, 7].max() > 1 for launch in launches), "both a decode and a chunk are split"


def test_layers_share_a_plan_until_the_lengths_change() -> None:
    step = Step((4, 2, 32, None, 16), torch.float32, [1, 1], [5, 300])
    step.how["on_device"] = on_device = lengths(step.starts, step.contexts)
    first = step.run(ours)
    (plan,) = on_device.plans.values()
    assert step.run(ours).equal(first) and next(iter(on_device.plans.values())) is plan
    assert not on_device.without_plans().plans


HOWS: list[dict[str, Any]] = [{}, {"window": 150, "how": {"sinks": torch.linspace(-2, 2, 2), "softcap": 9.0}}]
HOWS.append({"how": {"alibi_slopes": torch.tensor([0.5, 0.125])}})


@pytest.mark.parametrize("how", mostly_slow(HOWS, [HOWS[1]]))
def test_a_row_has_the_same_bits_in_any_batch(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "BATCH_INVARIANT_SPLIT", 128)
    step = Step((2, 1, 32, None, 16), torch.bfloat16, [1, 60, 1], [290, 300, 30], **how)
    mixed = step.run(ours, batch_invariant=True)
    for rows in (slice(0, 1), slice(1, 2), slice(2, 3)):
        alone = step.run(ours, rows, batch_invariant=True)
        assert alone.equal(mixed[step.starts[rows][0] :][: len(alone)])
    monkeypatch.setattr(ours, "PROGRAMS_PER_MULTIPROCESSOR", 0)
    assert step.run(ours, batch_invariant=True).equal(mixed)


@pytest.mark.parametrize("how", mostly_slow(HOWS, [HOWS[1]]))
def test_a_row_has_the_same_bits_in_any_chunk(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "BATCH_INVARIANT_SPLIT", 128)
    step = Step((2, 1, 32, None, 16), torch.float32, [40], [290], **how)
    whole, query = step.run(ours, batch_invariant=True), step.query
    for start, end in pairwise([0, 1, 18, 19, 38, 39, 40]):  # some chunks are single tokens, as in decode
        step.query, step.counts, step.contexts = query[start:end], [end - start], [290 - 40 + end]
        assert step.run(ours, batch_invariant=True).equal(whole[start:end])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(4, 2, 24, None, 16), (6, 1, 48, 32, 8)])
def test_a_cache_in_fp8(shape: Shape, dtype: torch.dtype) -> None:
    step = Step(shape, dtype, [1, 9, 1], [40, 30, 7], window=19)
    eight_bits = cache_fp8.quantise(step.cache)
    step.cache = eight_bits.to(dtype)
    expected = step.run(definition)
    step.cache = eight_bits
    tolerance = {"atol": 2e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1.6e-2, "rtol": 2**-7}
    for kernels, how in ((ours, {}), (ours, {"batch_invariant": True}), (attention, {})):
        torch.testing.assert_close(step.run(kernels, **how), expected, **tolerance)


@pytest.mark.parametrize("shape", [(4, 2, 24, None, 16), (6, 1, 48, 32, 8)])
def test_scales_of_a_cache_in_fp8(shape: Shape) -> None:
    """One scale for the keys and one for the values of each KV head; latent rows have one for both. Some keys are
    split."""
    how = {"sinks": torch.linspace(-2, 2, shape[0]), "softcap": 9.0}
    step = Step(shape, torch.bfloat16, [1, 20, 1], [700, 600, 7], how=how)
    scales = torch.tensor([[0.25, 3.0], [40.0, 0.5]]) if shape[3] is None else torch.tensor([[3.0]])
    by_row = scales[:, :, None, None]
    eight_bits = cache_fp8.quantise(step.cache / by_row)
    step.cache = (eight_bits.float() * by_row).to(torch.bfloat16)
    expected = step.run(definition)
    step.cache = eight_bits
    on_device = lengths(step.starts, step.contexts)
    for kernels, more in ((ours, {}), (ours, {"batch_invariant": True}), (attention, {})):
        step.how = {**how, "cache_scales": scales, "on_device": on_device.without_plans()}
        result = step.run(kernels, **more)
        torch.testing.assert_close(result, expected, atol=1.6e-2 * float(scales[-1].max()), rtol=2**-7)
        if kernels is ours:
            (launches,) = step.how["on_device"].plans.values()
            assert all(launch.items[:, 7].max() > 1 for launch in launches), "both a decode and a chunk are split"


def test_another_dtype_is_refused() -> None:
    step = Step((2, 1, 16, None, 16), torch.float64, [1], [5])
    with pytest.raises(ValueError, match="no Triton kernel for queries"):
        step.run(ours)


MODELS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "Llama 8B": ((32, 8, 128, None, 16), {}),
    "Gemma 2 9B": ((16, 8, 256, None, 16), {"window": 4096, "softcap": 50.0}),
    "gpt-oss": ((64, 8, 64, None, 16), {"window": 128, "sinks": torch.empty(64, device="meta")}),
    "BLOOM 7B": ((32, 32, 128, None, 16), {"alibi_slopes": torch.empty(32, device="meta")}),
    "DeepSeek V3": ((128, 1, 576, 512, 16), {}),
}


def launch(
    model: str,
    count: int,
    dtype: torch.dtype = torch.bfloat16,
    sequences: int = 1,
    context: int = 8192,
    cache_dtype: torch.dtype | None = None,
    **more: Any,
) -> None:
    """Launch the kernels for sequences with these numbers of new tokens, as an engine passes them: views without
    data."""
    (heads, kv_heads, head_dim, value_dim, block_size), how = MODELS[model]
    qkv = torch.empty((sequences * count, heads + 2 * kv_heads, head_dim), dtype=dtype, device="meta")
    parts = 1 if value_dim else 2
    cache = torch.empty((10**5, parts, kv_heads, block_size, head_dim), dtype=cache_dtype or dtype, device="meta")
    table = torch.empty((sequences, -(-context // block_size)), dtype=torch.int32, device="meta")
    on_device = Lengths(*(torch.empty(n, dtype=torch.int32, device="meta") for n in (sequences + 1, sequences)))
    arguments = (qkv[:, :heads], cache, table, range(0, sequences * count + 1, count), [context] * sequences)
    ours.paged_attention(*arguments, scale=0.1, value_dim=value_dim, on_device=on_device, **how, **more)


@pytest.fixture(scope="module")
def hopper() -> dict[str, list[Resources]]:
    """Compile decode, combine and prefill of each model, all in one process, since it takes seconds to start."""
    work: dict[str, Callable[[], Any]] = {
        model: lambda model=model: [launch(model, 1), launch(model, 8192)] for model in MODELS
    }
    work["invariant"] = lambda: [launch("Llama 8B", count, batch_invariant=True) for count in (1, 8192)]
    launches = [each for call in work.values() for each in record(call)]
    assert [each.kernel.name for each in launches] == ["make_work_list", "attend", "combine"] * 2 * len(work)
    found = compile_for(launches)
    return {name: found[6 * n : 6 * n + 6] for n, name in enumerate(work)}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_is_compiled_for_hopper(model: str, hopper: dict[str, list[Resources]]) -> None:
    lists, (decode, prefill), combines = hopper[model][::3], hopper[model][1::3], hopper[model][2::3]
    assert_fits([*lists, *combines])
    most = 320 if model == "DeepSeek V3" else 32  # 320: accumulators of 64 rows of 512 float32
    assert_fits([decode, prefill], stack_bytes=most)
    assert decode.has_mma and prefill.has_wgmma
    assert all("cp.async.cg.shared.global" in kernel.ptx for kernel in (decode, prefill))


CARDS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KB per program, by compute capability


@pytest.mark.slow
@pytest.mark.parametrize("capability", mostly_long([80, 86, 89, 100, 120], [80, 89, 100, 120]))
def test_tiles_fit_the_card(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_shared_bytes", lambda device: CARDS[capability] * 1024)
    chosen = ["Llama 8B", "DeepSeek V3", *(["Gemma 2 9B"] if CARDS[capability] < 160 else [])]
    launches = record(lambda: [launch(model, count) for model in chosen for count in (1, 8192)])
    launches += record(lambda: launch("DeepSeek V3", 1, batch_invariant=True))
    attends = [each for each in launches if each.kernel.name == "attend"]
    assert len(attends) == 2 * len(chosen) + 1
    for kernel in compile_for(attends, capability):
        assert kernel.shared_bytes <= CARDS[capability] * 1024, kernel


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 90])
def test_a_cache_in_fp8_is_compiled(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_shared_bytes", lambda device: CARDS[capability] * 1024)
    models = ("Llama 8B", "Gemma 2 9B", "DeepSeek V3")
    fp8 = {"cache_dtype": cache_fp8.DTYPE}
    scales = {
        model: torch.empty((2 - (model == "DeepSeek V3"), MODELS[model][0][1]), device="meta") for model in models
    }
    launches = record(
        lambda: [launch(model, count, cache_scales=scales[model], **fp8) for model in models for count in (1, 8192)]
    )
    attends = [each for each in launches if each.kernel.name == "attend"]
    assert len(attends) == 2 * len(models)
    for kernel in compile_for(attends, capability):
        assert kernel.shared_bytes <= CARDS[capability] * 1024 and kernel.has_mma, kernel


@pytest.mark.slow
def test_is_compiled_for_ampere_and_without_tensor_cores() -> None:
    launches = record(lambda: [launch("Llama 8B", 1), launch("Gemma 2 9B", 8192, torch.float32)])
    decode, prefill = compile_for([launches[1], launches[4]], 80)
    assert_fits([decode, prefill])
    assert decode.has_mma and not prefill.has_mma


@pytest.mark.slow
def test_the_invariant_kernels_have_one_shape_and_no_contraction(hopper: dict[str, list[Resources]]) -> None:
    assert_fits(hopper["invariant"])
    computing = [kernel for kernel in hopper["invariant"] if kernel.launch.kernel.name != "make_work_list"]
    assert not any(kernel.launch.options["enable_fp_fusion"] for kernel in computing)
    decode, prefill = (kernel.launch for kernel in hopper["invariant"][1::3])
    assert decode.options == prefill.options
    assert decode.constexprs["PLAN"] == replace(prefill.constexprs["PLAN"], single_query=True)


def test_no_step_makes_triton_compile_again() -> None:
    def decode(sequences: int, context: int) -> None:
        launch("Llama 8B", 1, sequences=sequences, context=context)

    steps = ((1, 500), (7, 8192), (16, 1024), (133, 500), (256, 8192))
    found = record(lambda: [decode(n, context) for n, context in steps])
    assert [each.kernel.name for each in found] == ["make_work_list", "attend", "combine"]
