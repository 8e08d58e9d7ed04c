"""Paged attention: equal to the definition, and a row's bits do not depend on the rest of the batch.

Tested with plain torch operations and with every compiled variant that this processor supports.
"""

from __future__ import annotations

import functools
import logging
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import attention as definition
from serve_llm.kernels import attention, linear, registry
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.library import Library
from support.matrix import mostly_slow
from support.paged import TOKENS, Cache, Compiled, Sequence, Shape, make_sequence, run

ANY_SHAPES: list[Shape] = [(6, 3, 7, 8), (3, 3, 20, 16), (10, 2, 36, 32), (7, 1, 80, 256), (4, 4, 64, 16)]
COMPILED_SHAPES: list[Shape] = [
    (6, 3, 16, 8),
    (3, 3, 24, 16),
    (10, 2, 40, 32),
    (7, 1, 80, 256),
    (14, 2, 64, 16),
    (2, 1, 128, 256),
    (3, 1, 256, 64),
    (135, 1, 16, 16),  # more heads per KV head than a task has rows
]
COMPILED = library.find()
VERSIONS: dict[str, Any] = {"portable": attention}
if COMPILED is not None:
    VERSIONS |= {variant: Compiled(Library(COMPILED, variant)) for variant in Library(COMPILED).variants}
CASES = [(name, shape) for name in VERSIONS for shape in (ANY_SHAPES if name == "portable" else COMPILED_SHAPES)]
DTYPES = [torch.float32, torch.bfloat16]


@functools.cache
def defined(shape: Shape, dtype: torch.dtype, window: int | None, lengths: tuple[int, ...]) -> list[Tensor]:
    sequences = [make_sequence(length, shape, dtype, length) for length in lengths]
    return run(sequences, shape, window, random.Random(2), kernels=definition)


@pytest.mark.parametrize("window", mostly_slow([None, 1, 19, 150], [None, 19]))
@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, [torch.bfloat16]))
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_equals_the_definition(name: str, shape: Shape, dtype: torch.dtype, window: int | None) -> None:
    lengths = (1, 2, 65, 300 if shape[0] == 14 else 140)  # tiles have 128 and 256 keys
    sequences = [make_sequence(length, shape, dtype, length) for length in lengths]
    ours = run(sequences, shape, window, random.Random(1), kernels=VERSIONS[name])
    tolerance = {"atol": 4e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2**-7}
    for left, right in zip(ours, defined(shape, dtype, window, lengths), strict=True):
        torch.testing.assert_close(left, right, **tolerance)


HOWS: dict[str, dict[str, Any]] = {  # these scores have a standard deviation of about 5
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "int8": {"int8": True},
    "ALiBi": {"alibi_slopes": True},
    "all": {"softcap": 7.0, "sinks": True, "alibi_slopes": True, "int8": True},
}
FEW_SHAPES: list[Shape] = [(6, 3, 24, 16), (14, 2, 64, 16), (10, 2, 40, 32)]


def arguments(how: str, shape: Shape) -> dict[str, Any]:
    """Return HOWS with a sink for each head, some far above all scores and some far below, and with ALiBi slopes."""
    found = dict(HOWS[how])
    if "sinks" in found:
        found["sinks"] = torch.linspace(-30, 30, shape[0])
    if "alibi_slopes" in found:
        found["alibi_slopes"] = torch.logspace(-8, 0, shape[0], base=2.0)
    return found


@pytest.mark.parametrize("window", mostly_slow([None, 19], [19]))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "shape", [FEW_SHAPES[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in FEW_SHAPES[1:])]
)
def test_changed_scores_and_int8_caches_equal_the_definition(
    shape: Shape, how: str, dtype: torch.dtype, window: int | None
) -> None:
    sequences = [make_sequence(length, shape, dtype, length) for length in (3, 262)]
    expected = run(sequences, shape, window, random.Random(2), kernels=definition, **arguments(how, shape))
    tolerance = {"atol": 4e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2**-7}
    for kernels in VERSIONS.values():
        ours = run(sequences, shape, window, random.Random(1), kernels=kernels, **arguments(how, shape))
        for left, right in zip(ours, expected, strict=True):
            torch.testing.assert_close(left, right, **tolerance)


@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, [torch.bfloat16]))
@pytest.mark.parametrize("how", mostly_slow(HOWS, ["int8", "all"]))
@pytest.mark.parametrize("name", VERSIONS)
def test_with_changed_scores_and_int8_bits_do_not_depend_on_batch_or_chunks(
    name: str, how: str, dtype: torch.dtype
) -> None:
    shape, rng, kernels = (10, 2, 40, 32), random.Random(3), VERSIONS[name]
    subject = make_sequence(300, shape, dtype, seed=0)
    (alone,) = run([subject], shape, None, rng, kernels=kernels, **arguments(how, shape))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for chunk in (1, 70):
            others = [make_sequence(rng.randint(1, 320), shape, dtype, rng.randrange(1000)) for _ in range(2)]
            together = run([*others, subject], shape, None, rng, chunk=chunk, kernels=kernels, **arguments(how, shape))
            assert torch.equal(together[2], alone)
    finally:
        torch.set_num_threads(before)


LATENT: dict[str, tuple[Shape, int]] = {  # the shape, and the value size
    "small": ((6, 1, 24, 16), 17),
    "of DeepSeek-V3, few heads": ((4, 1, 576, 64), 512),
    "with more heads than a task takes rows": ((130, 1, 40, 8), 24),
}


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, [torch.bfloat16]))
@pytest.mark.parametrize("case", LATENT)
def test_values_that_are_a_part_of_the_keys(case: str, dtype: torch.dtype, int8: bool) -> None:
    shape, value_dim = LATENT[case]
    how = {"value_dim": value_dim, "int8": int8}
    sequences = [make_sequence(length, shape, dtype, length) for length in (3, 262)]
    for sequence in sequences:
        sequence.query *= (24 / shape[2]) ** 0.5  # scores spread as in the other tests
    expected = run(sequences, shape, None, random.Random(2), kernels=definition, **how)
    tolerance = {"atol": 4e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2**-7}
    for kernels in VERSIONS.values():
        whole = run(sequences, shape, None, random.Random(1), kernels=kernels, **how)
        others = [make_sequence(length, shape, dtype, length) for length in (1, 140)]
        cut = run([*others, *sequences], shape, None, random.Random(3), chunk=70, kernels=kernels, **how)[2:]
        for ours, again, theirs in zip(whole, cut, expected, strict=True):
            assert ours.shape == (len(theirs), shape[0], value_dim)
            torch.testing.assert_close(ours, theirs, **tolerance)
            assert torch.equal(ours, again)  # whatever else is in the batch


@pytest.mark.parametrize("name", VERSIONS)
def test_an_int8_cache_costs_little(name: str) -> None:
    """Compared with the same attention over float32 keys and values: within 3 % of the outputs' spread (each value of
    normal keys and values is off by up to 1.2 % of their spread, 0.7 % on average)."""
    shape = (14, 2, 64, 16)
    sequence = make_sequence(300, shape, torch.float32, seed=1)
    sequence.query /= 6  # scores with a spread of about 1
    exact, rounded = (
        run([sequence], shape, None, random.Random(1), kernels=VERSIONS[name], int8=int8)[0] for int8 in (False, True)
    )
    assert not torch.equal(exact, rounded)
    assert (rounded - exact).std() < 0.03 * exact.std()


@pytest.mark.parametrize("window", mostly_slow([None, 50], [50]))
@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, [torch.bfloat16]))
@pytest.mark.parametrize(
    ("name", "shape", "threads"),
    [
        (name, shape, 3 if shape[0] == 10 else 1)
        for name, shape in CASES
        if shape not in ((2, 1, 128, 256), (3, 1, 256, 64), (135, 1, 16, 16))  # the kernels do nothing different there
    ]
    + [("portable", ANY_SHAPES[2], 1)],
)
def test_bits_do_not_depend_on_batch_or_chunks(
    name: str, shape: Shape, dtype: torch.dtype, window: int | None, threads: int
) -> None:
    rng = random.Random(3)
    kernels = VERSIONS[name]
    subject = make_sequence(300, shape, dtype, seed=0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (alone,) = run([subject], shape, window, rng, kernels=kernels)
        for chunk in (1, 9, 130):
            others = [make_sequence(rng.randint(1, 420), shape, dtype, rng.randrange(1000)) for _ in range(4)]
            together = run([*others[:2], subject, *others[2:]], shape, window, rng, chunk=chunk, kernels=kernels)
            assert torch.equal(together[2], alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", [name for name in VERSIONS if name != "portable"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_context_on_many_threads(name: str, dtype: torch.dtype) -> None:
    """Several threads process tiles of one row, which are merged in order: the bits equal those of one thread."""
    shape = (4, 2, 32, 16)
    subject = make_sequence(1500, shape, dtype, seed=5)
    outputs = []
    for threads in (1, 4):
        torch.set_num_threads(threads)
        outputs += run([subject], shape, None, random.Random(0), kernels=VERSIONS[name])
        outputs += [torch.cat([outputs[0][:1499], decoded(subject, shape, VERSIONS[name])])]
    torch.set_num_threads(1)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def decoded(subject: Sequence, shape: Shape, kernels: Any) -> Tensor:
    """Return the last token's output, computed alone."""
    cache = Cache(shape, subject.query.dtype, random.Random(1))
    blocks = cache.table(len(subject))
    slots = [blocks[p // cache.block_size] * cache.block_size + p % cache.block_size for p in range(len(subject))]
    kernels.write_cache(subject.key, subject.value, cache.view, torch.tensor(slots))
    registry = torch.tensor([blocks], dtype=torch.int32)
    return kernels.paged_attention(subject.query[-1:], cache.view, registry, [0, 1], [len(subject)], scale=0.3)


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_with_strides(name: str, dtype: torch.dtype) -> None:
    """Query, key and value are slices of one matrix, as in models."""
    heads, kv_heads, head_dim, block_size = shape = (6, 3, 16, 8)
    whole = torch.randn((30, (heads + 2 * kv_heads) * head_dim), generator=torch.Generator().manual_seed(1)).to(dtype)
    parts = whole.split_with_sizes([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], -1)
    query, key, value = (part.unflatten(1, (-1, head_dim)) for part in parts)
    outputs = []
    for kernels in (VERSIONS[name], definition):
        cache = Cache(shape, dtype, random.Random(0))
        blocks = cache.table(30)
        slots = torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in range(30)])
        kernels.write_cache(key, value, cache.view, slots)
        registry = torch.tensor([blocks], dtype=torch.int32)
        outputs.append(kernels.paged_attention(query, cache.view, registry, [0, 30], [30], scale=0.25))
    torch.testing.assert_close(*outputs, atol=2e-2 if dtype == torch.bfloat16 else 2e-5, rtol=2**-7)


@pytest.mark.parametrize(
    "how", [{}, {"int8": True}, {"softcap": 5.0}, {"sinks": torch.ones(6)}, {"alibi_slopes": torch.ones(6)}]
)
@pytest.mark.parametrize("name", VERSIONS)
def test_not_a_number_among_the_seen_shows(name: str, how: dict[str, Any]) -> None:
    """A model's NaN must be noticed, not smoothed over."""
    shape = (6, 3, 16, 8)
    subject = make_sequence(20, shape, torch.float32, 0)
    for broken in (subject.key, subject.value):
        kept = broken[7].clone()
        broken[7] = torch.nan
        (output,) = run([subject], shape, None, random.Random(0), kernels=VERSIONS[name], **how)
        assert output[7:].isnan().all()
        broken[7] = kept


@pytest.mark.parametrize("position", [128, 256])
@pytest.mark.parametrize("name", VERSIONS)
def test_not_a_number_that_alone_is_seen_of_a_tile_shows(name: str, position: int) -> None:
    shape = (6, 3, 16, 8)
    subject = make_sequence(position + 4, shape, torch.float32, 0)
    subject.key[position] = torch.nan
    (output,) = run([subject], shape, None, random.Random(0), kernels=VERSIONS[name])
    assert output[position:].isnan().all() and not output[:position].isnan().any()


@pytest.mark.parametrize("name", VERSIONS)
def test_write_cache_equals_the_definition(name: str) -> None:
    shape = (6, 3, 7, 8)
    caches = [Cache(shape, torch.float32, random.Random(0)).view.nan_to_num_() for _ in range(2)]
    tokens = make_sequence(30, shape, torch.float32, 0)
    slots = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))[:30]
    VERSIONS[name].write_cache(tokens.key, tokens.value, caches[0], slots)
    definition.write_cache(tokens.key, tokens.value, caches[1], slots)
    assert torch.equal(caches[0], caches[1])
    assert caches[0].count_nonzero() == 2 * tokens.key.numel()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VERSIONS)
def test_rows_of_an_int8_cache_equal_the_definition(name: str, dtype: torch.dtype) -> None:
    shape = (6, 3, 20, 8)
    tokens = make_sequence(40, shape, dtype, 0)
    tokens.key[:8] *= torch.tensor([0.0, 1e-38, 1e-33, 1e-29, 1e-10, 1e10, 1e37, 3e38])[:, None, None].to(dtype)
    tokens.key[8, :, 3], tokens.value[9, 1, :] = torch.inf, torch.nan
    tokens.key[10] = torch.arange(60).view(3, 20) - 29.5  # rounded half to even after scaling
    slots = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))[:40]
    views = [torch.zeros_like(Cache(shape, torch.int8, random.Random(0)).view) for _ in range(2)]
    for kernels, view in zip((VERSIONS[name], definition), views, strict=True):
        kernels.write_cache(tokens.key, tokens.value, view, slots)
    numbers = [view[..., :-4] for view in views]
    scales = [view[..., -4:].contiguous().view(torch.float32) for view in views]
    assert torch.equal(*numbers)
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)
    written = scales[0].transpose(1, 3).flatten(0, 1)[..., 0]  # (slots, kv_heads, 2)
    assert written[slots[8], :, 0].isinf().all() and written[slots[9], 1, 1].isnan()
    assert numbers[0].abs().max() == 127


@pytest.mark.skipif(COMPILED is None, reason="no C++ compiler at installation")
def test_the_compiled_kernels_are_chosen_where_they_can_be(caplog: pytest.LogCaptureFixture) -> None:
    for dtype in DTYPES:
        chosen = registry.choose(torch.device("cpu"), dtype, {16, 128})
        assert chosen.paged_attention.__self__.variant == list(VERSIONS)[-1]
    assert registry.choose(torch.device("meta"), torch.bfloat16, {16}) is registry.PORTABLE
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("found", "dtype", "head_dims", "reason"),
    [
        (None, torch.float32, {64}, "there was no C++ compiler"),
        (Path(__file__), torch.float16, {64}, "for torch.float16"),
        (Path(__file__), torch.float32, {64}, "cannot be loaded"),
    ],
)
def test_without_them_plain_torch_and_one_line(
    found: Path | None,
    dtype: torch.dtype,
    head_dims: set[int],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(library, "find", lambda: found)
    with caplog.at_level(logging.WARNING):
        chosen = registry.choose(torch.device("cpu"), dtype, head_dims)
    assert replace(chosen, pack=linear.pack, pack_heads=linear.pack_heads) == registry.PORTABLE
    (line,) = caplog.messages
    assert reason in line


@pytest.mark.skipif(COMPILED is None, reason="no C++ compiler at installation")
@pytest.mark.parametrize("head_dim", [20, 512])
def test_other_heads_take_plain_torch_for_attention(head_dim: int, caplog: pytest.LogCaptureFixture) -> None:
    chosen = registry.choose(torch.device("cpu"), torch.float32, {64, head_dim})
    assert chosen.paged_attention is registry.PORTABLE.paged_attention and chosen.pack is not registry.PORTABLE.pack
    (line,) = caplog.messages
    assert f"heads of {head_dim} numbers" in line
    latent = registry.choose(torch.device("cpu"), torch.float32, (), {576})
    assert latent.paged_attention is not registry.PORTABLE.paged_attention
    assert registry.choose(torch.device("cpu"), torch.float32, (), {20}).paged_attention is chosen.paged_attention


def test_a_variant_that_is_not_there() -> None:
    if COMPILED is None:
        pytest.skip("no C++ compiler at installation")
    with pytest.raises(ValueError, match="no variant avx1024 for this processor, but baseline"):
        Library(COMPILED, "avx1024")
