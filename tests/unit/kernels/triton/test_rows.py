"""Triton's row kernels, interpreted: equal to the plain torch operations, and a row's bits depend only on that row.
Compiled: they fit, and read memory in the largest pieces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import activation as activation_definition
from reference import norm as norm_definition
from serve_llm.kernels import activation, cache_fp8, linear_fp8, linear_fp8_blocks, norm, rope
from serve_llm.kernels.rope import HeadNorms
from support.matrix import mostly_slow
from support.triton import NO_TRITON, assert_fits, compile_for, record

pytest.importorskip("triton", reason=NO_TRITON)
from serve_llm.kernels.triton import rope as triton_rope
from serve_llm.kernels.triton.activation import ACTIVATIONS
from serve_llm.kernels.triton.fp8 import quantise_blocks, quantise_rows
from serve_llm.kernels.triton.norm import add_rms_norm, layer_norm, rms_norm
from serve_llm.kernels.triton.rope import rope_and_cache, rope_and_latent

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
WIDTHS = [1, 7, 896, 1500]
ROWS = 8
ROUNDING = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2e-6}  # two units in the last place


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    """Check to the bit in 16-bit types, except where a sum in another order changes a rounding."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=ROUNDING[ours.dtype], atol=2e-6, equal_nan=True)
    assert ours.dtype == torch.float32 or (ours != theirs).sum() <= 1 + 0.005 * ours.numel()


def assert_rows_alone(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check that any rows of x have the bits that computing all of x gives."""
    whole = function(x)
    for first, last in ((0, 1), (3, 5), (5, len(x))):
        assert torch.equal(function(x[first:last]), whole[first:last])


@pytest.mark.parametrize("dtype", DTYPES)
class TestNorm:
    @pytest.mark.parametrize("width", WIDTHS)
    def test_rms_norm(self, width: int, dtype: torch.dtype) -> None:
        weight, x = random(width, dtype=dtype, seed=1), random(ROWS, width, dtype=dtype) * 3
        assert_equal(rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6))
        assert_rows_alone(lambda rows: rms_norm(rows, weight, 1e-6), x)

    def test_a_weight_in_float32_is_rounded_once(self, dtype: torch.dtype) -> None:
        weight, x = random(1500, seed=1) + 1, random(ROWS, 1500, dtype=dtype) * 3
        assert_equal(rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6))

    def test_shapes_and_strides(self, dtype: torch.dtype) -> None:
        weight, x = random(24, dtype=dtype, seed=1), random(5, 3, 40, dtype=dtype)
        for part in (x[:, :, 8:32], x[:, 1, :24], x[:1, :1, :24], x[:0, :, :24], x[:, :, :24].transpose(0, 1)):
            assert_equal(rms_norm(part, weight, 1e-6), norm.rms_norm(part, weight, 1e-6))
        across = random(24, 6, dtype=dtype).T
        assert_equal(rms_norm(across, weight, 1e-6), norm.rms_norm(across, weight, 1e-6))

    @pytest.mark.parametrize("width", WIDTHS)
    def test_add_rms_norm(self, width: int, dtype: torch.dtype) -> None:
        weight, hidden = random(width, dtype=dtype, seed=1), random(ROWS, width, dtype=dtype) * 3
        delta, kept = random(ROWS, width, dtype=dtype, seed=2), hidden.clone()
        wanted = hidden + delta
        total, normed = add_rms_norm(hidden, delta, weight, 1e-6)
        assert torch.equal(total, wanted) and total.data_ptr() == delta.data_ptr()
        assert torch.equal(normed, rms_norm(wanted, weight, 1e-6))
        assert torch.equal(hidden, kept)

    @pytest.mark.parametrize("affine", ["both", "weight", "none"])
    @pytest.mark.parametrize("width", [7, 896])
    def test_layer_norm(self, width: int, affine: str, dtype: torch.dtype) -> None:
        weight = None if affine == "none" else random(width, dtype=dtype, seed=1) + 1
        bias = random(width, dtype=dtype, seed=2) if affine == "both" else None
        x = random(ROWS, width, dtype=dtype) * 3 + 5
        # differences of numbers: the error is relative to the terms, not to the result
        ours, exact = layer_norm(x, weight, bias, 1e-5), norm_definition.layer_norm(x, weight, bias, 1e-5)
        torch.testing.assert_close(ours, exact, rtol=ROUNDING[dtype], atol=4 * ROUNDING[dtype])
        assert dtype == torch.float32 or (ours != exact).float().mean() < 0.01
        assert_rows_alone(lambda rows: layer_norm(rows, weight, bias, 1e-5), x)

    def test_what_is_not_finite(self, dtype: torch.dtype) -> None:
        weight, x = random(24, dtype=dtype), random(4, 24, dtype=dtype)
        x[1, 23], x[2, 5], x[3] = torch.nan, torch.inf, 0.0
        ours = rms_norm(x, weight, 1e-6)
        assert ours[1].isnan().all() and ours[2].isnan().any() and not ours[3].any()
        torch.testing.assert_close(ours, norm.rms_norm(x, weight, 1e-6), rtol=2**-7, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("name", [*ACTIVATIONS])
class TestActivation:
    @pytest.mark.parametrize("dtype", mostly_slow(DTYPES, [torch.bfloat16]))
    @pytest.mark.parametrize("width", [1, 7, 1500])
    def test_equals_torch(self, width: int, name: str, dtype: torch.dtype) -> None:
        x = random(ROWS, 2 * width, dtype=dtype) * 4
        ours = ACTIVATIONS[name](x)
        if name == "silu_and_mul":  # rounded between silu and the product, unlike the definition
            assert_equal(ours, activation.silu_and_mul(x))
        else:
            exact = getattr(activation_definition, name)(x)
            torch.testing.assert_close(ours, exact, rtol=ROUNDING[dtype], atol=1e-6)
        assert_rows_alone(ACTIVATIONS[name], x)

    def test_strides_and_no_rows(self, name: str) -> None:
        x = random(9, 100)[:, 3:67]
        assert torch.equal(ACTIVATIONS[name](x), ACTIVATIONS[name](x.clone()))
        assert torch.equal(ACTIVATIONS[name](x.T.contiguous().T), ACTIVATIONS[name](x))
        assert ACTIVATIONS[name](x[:0]).shape == (0, 32 if name.endswith("_and_mul") else 64)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_far_out_and_not_finite(self, name: str, dtype: torch.dtype) -> None:
        x = torch.tensor([[-1000.0, -90.0, 0.0, 90.0, 1000.0, torch.inf, -torch.inf, torch.nan]], dtype=dtype)
        if name.endswith("_and_mul"):
            x = torch.cat((x, torch.ones_like(x)), -1)
        ours, theirs = ACTIVATIONS[name](x), getattr(activation, name)(x)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, [torch.bfloat16]))
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 3, 16), (5, 1, 80), (18, 2, 64)])
@pytest.mark.parametrize(
    ("with_norms", "with_angles"),
    [(None, False), (None, True), ("narrow", False), ("narrow", True), ("wide", True)],
)
def test_rope_and_cache(
    heads: int, kv_heads: int, head_dim: int, with_norms: str | None, with_angles: bool, dtype: torch.dtype
) -> None:
    block_size = 8
    whole = random(ROWS, (heads + 2 * kv_heads) * head_dim + 5, dtype=dtype)
    qkv = whole[:, 2:-3]  # rows are not adjacent
    kind = torch.float32 if with_norms == "wide" else dtype
    weights = HeadNorms(random(head_dim, dtype=kind), random(head_dim, dtype=kind, seed=3), 1e-6)
    angle = random(ROWS, head_dim // 2, seed=2) * 3
    slots = torch.randperm(10 * block_size, generator=torch.Generator().manual_seed(0))[:ROWS]

    def run(version: Callable[..., Tensor], rows: list[int]) -> tuple[Tensor, Tensor]:
        """Run the kernel. The cache is a view of one with all layers."""
        cache = torch.zeros((10, 3, 2, kv_heads, block_size, head_dim), dtype=dtype)
        angles = (angle[rows].cos(), angle[rows].sin()) if with_angles else None
        query = version(qkv[rows], heads, weights if with_norms else None, angles, cache[:, 1], slots[rows])
        return query, cache

    (query, cache), theirs = run(rope_and_cache, list(range(ROWS))), run(rope.rope_and_cache, list(range(ROWS)))
    assert query.is_contiguous()
    assert_equal(query, theirs[0])
    assert_equal(cache, theirs[1])
    if not with_norms and dtype != torch.float32:
        assert torch.equal(query, theirs[0]) and torch.equal(cache, theirs[1])
    alone, written = run(rope_and_cache, [4, 7])
    assert torch.equal(alone, query[[4, 7]])
    places = [(slot // block_size, 1, slice(None), slice(None), slot % block_size) for slot in slots[[4, 7]].tolist()]
    assert all(torch.equal(written[place], cache[place]) for place in places)


@pytest.mark.parametrize("dtype", mostly_slow(DTYPES, [torch.bfloat16]))
@pytest.mark.parametrize(("heads", "rank", "rope_dim"), [(5, 40, 16), (18, 64, 64)])
@pytest.mark.parametrize("with_angles", [False, True])
def test_rope_and_latent(heads: int, rank: int, rope_dim: int, with_angles: bool, dtype: torch.dtype) -> None:
    block_size = 8
    query = random(ROWS, heads, 7 + rope_dim, dtype=dtype)[:, :, 7:]  # both are views of wider rows
    latent, norms = random(ROWS, 9 + rank + rope_dim, dtype=dtype, seed=1)[:, 9:], random(rank, dtype=dtype, seed=3)
    angle = random(ROWS, rope_dim // 2, seed=2) * 3
    slots = torch.randperm(10 * block_size, generator=torch.Generator().manual_seed(0))[:ROWS]

    def run(version: Callable[..., Tensor], rows: list[int], slots: Tensor) -> tuple[Tensor, Tensor]:
        cache = torch.zeros((10, 3, 1, 1, block_size, rank + rope_dim), dtype=dtype)
        angles = (angle[rows].cos(), angle[rows].sin()) if with_angles else None
        return version(query[rows], latent[rows], norms, 1e-6, angles, cache[:, 1], slots), cache

    every = list(range(ROWS))
    (turned, cache), theirs = run(rope_and_latent, every, slots), run(rope.rope_and_latent, every, slots)
    assert turned.is_contiguous()
    assert_equal(turned, theirs[0])
    assert_equal(cache, theirs[1])
    unstored = slots.clone()
    unstored[[0, 4]] = -1
    kept, written = run(rope_and_latent, every, unstored)
    assert torch.equal(kept, turned)
    for slot in slots[[0, 4]].tolist():
        assert cache[slot // block_size, 1, 0, 0, slot % block_size].any()
        cache[slot // block_size, 1, 0, 0, slot % block_size] = 0.0
    assert torch.equal(written, cache)
    alone, _ = run(rope_and_latent, [4, 7], slots[[4, 7]])
    assert torch.equal(alone, turned[[4, 7]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_in_fp8(dtype: torch.dtype) -> None:
    """Numbers are rounded as in the definition, and too large ones become the largest."""
    qkv = (random(ROWS, 6 * 24) * torch.logspace(-5, 3, ROWS)[:, None]).to(dtype)
    qkv[0, 50], qkv[1, 51] = torch.nan, torch.inf
    query, latent, norm = random(ROWS, 3, 16, dtype=dtype), random(ROWS, 56, dtype=dtype), random(40, dtype=dtype)
    slots = torch.randperm(16, generator=torch.Generator().manual_seed(0))[:ROWS]

    def write(kernels: Any) -> tuple[Tensor, Tensor]:
        cache = torch.zeros((2, 2, 2, 8, 24), dtype=torch.uint8).view(cache_fp8.DTYPE)
        rows = torch.zeros((2, 1, 1, 8, 56), dtype=torch.uint8).view(cache_fp8.DTYPE)
        assert kernels.rope_and_cache(qkv.clone(), 2, None, None, cache, slots).dtype == dtype
        assert kernels.rope_and_latent(query, latent, norm * 900, 1e-6, None, rows, slots).dtype == dtype
        return cache.float(), rows.float()

    for ours, theirs in zip(write(triton_rope), write(rope), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-3, atol=2.0**-9, equal_nan=True)
        assert (ours.nan_to_num() != theirs.nan_to_num()).sum() <= 1 + 0.005 * ours.numel()
        assert ours.nan_to_num().abs().max() == 448.0
    assert ours.isnan().sum() == 0 and write(triton_rope)[0].isnan().sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_a_cache_in_fp8(dtype: torch.dtype) -> None:
    """Keys and values are divided by their heads' scales, latent rows by one."""
    qkv = (random(ROWS, (5 + 2 * 3) * 24) * 3000).to(dtype)
    query, latent, norm = random(ROWS, 3, 16, dtype=dtype), random(ROWS, 56, dtype=dtype), random(40, dtype=dtype)
    slots = torch.randperm(16, generator=torch.Generator().manual_seed(0))[:ROWS]
    scales = torch.tensor([[100.0, 50.0, 7.0], [1000.0, 0.5, 20.0]])
    angles = random(ROWS, 12), random(ROWS, 12)

    def write(kernels: Any, scales: Tensor | None, latent_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        cache = torch.zeros((2, 2, 3, 8, 24), dtype=torch.uint8).view(cache_fp8.DTYPE)
        rows = torch.zeros((2, 1, 1, 8, 56), dtype=torch.uint8).view(cache_fp8.DTYPE)
        turned = kernels.rope_and_cache(qkv.clone(), 5, None, angles, cache, slots, cache_scales=scales)
        kernels.rope_and_latent(query, latent, norm * 900, 1e-6, None, rows, slots, cache_scales=latent_scale)
        torch.testing.assert_close(turned, rope.rope_and_cache(qkv.clone(), 5, None, angles, cache.clone(), slots))
        return cache.float(), rows.float()

    found = write(triton_rope, scales, torch.tensor([[30.0]]))
    for ours, theirs in zip(found, write(rope, scales, torch.tensor([[30.0]])), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2.0**-3, atol=2.0**-9)
        assert (ours != theirs).sum() <= 1 + 0.005 * ours.numel()
    wide = torch.zeros((2, 2, 3, 8, 24))
    rope.rope_and_cache(qkv.float(), 5, None, angles, wide, slots)
    exact = (wide / scales[:, :, None, None]).clamp(-448, 448)
    torch.testing.assert_close(found[0], exact, rtol=2.0**-3, atol=2.0**-9)


def test_tokens_without_a_slot_are_not_stored() -> None:
    cache = torch.full((3, 2, 2, 4, 16), 7.0)
    qkv, slots = random(4, 6 * 16), torch.tensor([-1, 5, -1, 11])
    query = rope_and_cache(qkv, 2, None, None, cache, slots)
    assert torch.equal(query, qkv.view(4, 6, 16)[:, :2])
    assert torch.equal(cache[1, 0, :, 1], qkv.view(4, 6, 16)[1, 2:4])
    assert torch.equal(cache[2, 1, :, 3], qkv.view(4, 6, 16)[3, 4:])
    assert (cache == 7.0).sum() == cache.numel() - 2 * 2 * 2 * 16
    assert rope_and_cache(qkv[:0], 2, None, None, cache, slots[:0]).shape == (0, 2, 16)


class TestFp8Rows:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [1, 16, 887, 1500])
    def test_equals_torch_to_the_bit(self, width: int, dtype: torch.dtype) -> None:
        x = (random(ROWS, width) * torch.logspace(-4, 4, ROWS)[:, None]).to(dtype)
        x[3] = 0.0
        padded = -(-width // 16) * 16
        for part in (x, x[:, : width // 2 + 1]):
            (numbers, scales), theirs = quantise_rows(part, padded), linear_fp8.quantise_rows(part, padded)
            assert numbers.shape == (ROWS, padded) and torch.equal(
                numbers.view(torch.uint8), theirs[0].view(torch.uint8)
            )
            assert torch.equal(scales, theirs[1])
        assert_rows_alone(lambda rows: quantise_rows(rows, padded)[0].float(), x)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_static_scale(self, dtype: torch.dtype) -> None:
        x = (random(ROWS, 53) * torch.logspace(-4, 4, ROWS)[:, None]).to(dtype)
        for scale in (torch.tensor(0.003), torch.tensor(1.7)):
            ours, theirs = (version(x, 64, scale) for version in (quantise_rows, linear_fp8.quantise_rows))
            assert torch.equal(ours[0].view(torch.uint8), theirs[0].view(torch.uint8))
            assert torch.equal(ours[1], theirs[1]) and (ours[1] == scale).all() and ours[1].shape == (ROWS, 1)
            assert (ours[0].float().abs() == 448.0).any() and ours[0].float().isfinite().all()

    @pytest.mark.parametrize("scale", [None, torch.tensor(0.1)])
    def test_what_is_not_finite_shows(self, scale: Tensor | None) -> None:
        x = random(3, 50)
        x[0, 49], x[1, 3] = torch.nan, -torch.inf
        for version in (quantise_rows, linear_fp8.quantise_rows):
            numbers, scales = version(x, 64, scale)
            assert (numbers.float() * scales).isnan().any(1).tolist() == [True, True, False]


class TestFp8Blocks:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", [1, 128, 887, 1500])
    def test_equals_torch_to_the_bit(self, width: int, dtype: torch.dtype) -> None:
        x = (random(ROWS, width) * torch.logspace(-4, 4, ROWS)[:, None]).to(dtype)
        x[3] = 0.0
        padded = -(-width // 128) * 128
        for part in (x, x[:, : width // 2 + 1], x[:1], x[:0]):
            ours, theirs = (version(part, padded) for version in (quantise_blocks, linear_fp8_blocks.quantise_blocks))
            assert torch.equal(ours[0].view(torch.uint8), theirs[0].view(torch.uint8))
            assert torch.equal(ours[1], theirs[1])
            if len(part) and ours[1].shape[1] > 1:
                assert ours[1].stride() == theirs[1].stride()
        assert_rows_alone(lambda rows: quantise_blocks(rows, padded)[0][: len(rows)].float(), x)

    def test_what_is_not_finite_shows(self) -> None:
        x = random(3, 200)
        x[0, 199], x[1, 3] = torch.nan, -torch.inf
        for version in (quantise_blocks, linear_fp8_blocks.quantise_blocks):
            numbers, scales = version(x, 256)
            restored = numbers.float() * scales.repeat_interleave(128, 1)
            assert restored.isnan().any(1).tolist() == [True, True, False, False]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rope_of(heads: int, kv_heads: int, head_dim: int, fp8: bool = False) -> Tensor:
    angle, head = empty(3, head_dim // 2, dtype=torch.float32), empty(head_dim)
    qkv, layers = empty(3, (heads + 2 * kv_heads) * head_dim), empty(10, 3, 2, kv_heads, 16, head_dim)
    slots = empty(3, dtype=torch.int64)
    norms = HeadNorms(head, head, 1e-6)
    if not fp8:
        return rope_and_cache(qkv, heads, norms, (angle, angle), layers[:, 1], slots)
    layers = empty(10, 3, 2, kv_heads, 16, head_dim, dtype=cache_fp8.DTYPE)
    scales = empty(2, kv_heads, dtype=torch.float32)
    return rope_and_cache(qkv, heads, norms, (angle, angle), layers[:, 1], slots, scales)


def latent_of(heads: int, rank: int, rope_dim: int, fp8: bool = False) -> Tensor:
    query, latent = empty(3, heads, 128 + rope_dim)[:, :, 128:], empty(3, 1536 + rank + rope_dim)[:, 1536:]
    angle, slots = empty(3, rope_dim // 2, dtype=torch.float32), empty(3, dtype=torch.int64)
    cache = empty(10, 1, 1, 16, rank + rope_dim, dtype=cache_fp8.DTYPE if fp8 else torch.bfloat16)
    scales = empty(1, 1, dtype=torch.float32) if fp8 else None
    return rope_and_latent(query, latent, empty(rank), 1e-6, (angle, angle), cache, slots, scales)


@pytest.mark.slow
def test_writing_a_cache_in_fp8_is_compiled() -> None:
    found = compile_for(
        [*record(lambda: rope_of(32, 8, 128, fp8=True)), *record(lambda: latent_of(128, 512, 64, True))]
    )
    assert_fits(found)
    assert len(found) == 2


@pytest.mark.slow
def test_compiled_for_a_gpu() -> None:
    """Uses the widths of Llama 3 from 8B to 405B, and the heads of Qwen2.5 0.5B and DeepSeek-V3."""
    rows, weight, wide = empty(3, 4096), empty(4096), torch.empty((3, 16384), device="meta")
    calls: list[Callable[[], object]] = [
        lambda: add_rms_norm(rows, rows, weight, 1e-6),
        lambda: add_rms_norm(wide, wide, wide[0], 1e-6),
        lambda: layer_norm(rows, weight, weight, 1e-6),
        *(partial(function, empty(3, 2 * 14336)) for function in ACTIVATIONS.values()),
        lambda: rope_of(32, 8, 128),
        lambda: rope_of(14, 2, 64),
        lambda: latent_of(128, 512, 64),
        lambda: quantise_rows(empty(3, 28672), 28672),
        lambda: quantise_rows(empty(3, 28672), 28672, empty(dtype=torch.float32)),
        lambda: quantise_blocks(empty(3, 28672), 28672),
    ]
    found = compile_for([launch for call in calls for launch in record(call)])
    assert_fits(found)
    assert len(found) == len(calls)
    for kernel in found:
        assert kernel.registers <= 64
        assert "ld.global.v4" in kernel.ptx and "st.global.v4" in kernel.ptx, kernel.launch
