"""Compiled row kernels in every variant that this processor supports: equal to the plain torch operations, and a row's
bits depend only on that row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from reference import activation as activation_definition
from reference import norm as norm_definition
from serve_llm.kernels import activation, linear_int8, norm, rope
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.cpu.rows import RowKernels
from serve_llm.kernels.rope import HeadNorms

COMPILED = library.find()
pytestmark = pytest.mark.skipif(COMPILED is None, reason="no C++ compiler at installation")
VARIANTS = [] if COMPILED is None else list(Library(COMPILED).variants)
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 7, 24, 63, 896, 4864]
ACTIVATIONS = ["silu_and_mul", "gelu_tanh_and_mul", "gelu", "gelu_tanh"]
ROWS = 40


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> RowKernels:
    assert COMPILED is not None
    return RowKernels(Library(COMPILED, request.param))


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    kind = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[left.element_size()]
    return left.shape == right.shape and torch.equal(left.contiguous().view(kind), right.contiguous().view(kind))


def assert_rows_alone(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Check that any rows of x, on 1 to 3 threads, have the bits that computing all of x gives."""
    whole = function(x)
    for threads, count in itertools.product((1, 2, 3), (1, 2, 5, 17, 32, len(x))):
        torch.set_num_threads(threads)
        first = 7 * count % (len(x) - count + 1)
        assert same_bits(function(x[first : first + count]), whole[first : first + count]), f"{count} rows"


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Check with tolerance: a sum in another order may change a rounding by one unit in the last place, in float32 by a
    few."""
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=2**-7 if ours.dtype == torch.bfloat16 else 1e-6, atol=1e-7)


@pytest.mark.parametrize("magnitude", [1.0, 1.3])
@pytest.mark.parametrize("pairs", [1, 7, 64])
def test_angles(kernels: RowKernels, pairs: int, magnitude: float) -> None:
    positions = torch.arange(ROWS) * 25_000
    frequencies = 1.0 / 10_000 ** (torch.arange(pairs) / pairs)
    ours = kernels.compute_angles(positions, frequencies, magnitude)
    theirs = rope.compute_angles(positions, frequencies, magnitude)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=3e-7)
        assert left.is_contiguous()
    assert_rows_alone(lambda some: torch.cat(kernels.compute_angles(some, frequencies, magnitude), 1), positions)


class TestNorm:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_rms_norm(self, kernels: RowKernels, width: int, dtype: torch.dtype) -> None:
        weight, x = random(width, dtype=dtype, seed=1), random(ROWS, width, dtype=dtype) * 3
        ours, theirs = kernels.rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6)
        assert_close(ours, theirs)
        assert dtype == torch.float32 or (ours != theirs).float().mean() < 0.01
        assert_rows_alone(lambda rows: kernels.rms_norm(rows, weight, 1e-6), x)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_add_rms_norm(self, kernels: RowKernels, width: int, dtype: torch.dtype) -> None:
        weight, hidden = random(width, dtype=dtype, seed=1), random(ROWS, width, dtype=dtype) * 3
        delta = random(ROWS, width, dtype=dtype, seed=2)
        total, normed = kernels.add_rms_norm(hidden, delta.clone(), weight, 1e-6)
        assert same_bits(total, hidden + delta)
        assert same_bits(normed, kernels.rms_norm(total, weight, 1e-6))

        def both(rows: Tensor) -> Tensor:
            left, right = rows.chunk(2, -1)
            return torch.cat(kernels.add_rms_norm(left, right.clone(), weight, 1e-6), -1)

        assert_rows_alone(both, torch.cat((hidden, delta), -1))

    @pytest.mark.parametrize("affine", ["none", "weight", "both", "float32"])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_layer_norm(self, kernels: RowKernels, width: int, dtype: torch.dtype, affine: str) -> None:
        kind = torch.float32 if affine == "float32" else dtype
        weight = None if affine == "none" else random(width, dtype=kind, seed=1)
        bias = random(width, dtype=kind, seed=2) if affine in ("both", "float32") else None
        x = random(ROWS, width, dtype=dtype) * 3 + 5
        ours = kernels.layer_norm(x, weight, bias, 1e-5)
        exact = norm.layer_norm(
            x.double(),
            None if weight is None else weight.double(),
            None if bias is None else bias.double(),
            1e-5,
        )
        close = {"rtol": 2**-8, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-5}
        torch.testing.assert_close(ours.double(), exact, **close)
        assert_rows_alone(lambda rows: kernels.layer_norm(rows, weight, bias, 1e-5), x)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_add_layer_norm(self, kernels: RowKernels, width: int, dtype: torch.dtype) -> None:
        weight, bias = random(width, dtype=dtype, seed=1), random(width, dtype=dtype, seed=3)
        hidden, delta = random(ROWS, width, dtype=dtype) * 3, random(ROWS, width, dtype=dtype, seed=2)
        total, normed = kernels.add_layer_norm(hidden, delta.clone(), weight, bias, 1e-6)
        assert same_bits(total, hidden + delta)
        assert same_bits(normed, kernels.layer_norm(total, weight, bias, 1e-6))

    @pytest.mark.parametrize("width", WIDTHS)
    def test_a_weight_in_float32_is_rounded_once(self, kernels: RowKernels, width: int) -> None:
        weight, x = random(width, seed=1) + 1, random(ROWS, width, dtype=torch.bfloat16) * 3
        ours = kernels.rms_norm(x, weight, 1e-6)
        assert_close(ours, norm.rms_norm(x, weight, 1e-6))
        assert (ours != norm_definition.rms_norm(x, weight, 1e-6)).float().mean() < 0.01
        total, normed = kernels.add_rms_norm(x, torch.zeros_like(x), weight, 1e-6)
        assert same_bits(total, x) and same_bits(normed, ours)
        assert_rows_alone(lambda rows: kernels.rms_norm(rows, weight, 1e-6), x)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_is_not_finite(self, kernels: RowKernels, dtype: torch.dtype) -> None:
        weight, x = random(24, dtype=dtype), random(4, 24, dtype=dtype)
        x[1, 23], x[2, 5], x[3] = torch.nan, torch.inf, 0.0
        ours, theirs = kernels.rms_norm(x, weight, 1e-6), norm.rms_norm(x, weight, 1e-6)
        assert ours[1].isnan().all() and ours[2].isnan().any()
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=1e-7, equal_nan=True)


class TestActivation:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", ACTIVATIONS)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_equals_the_definition(self, kernels: RowKernels, width: int, name: str, dtype: torch.dtype) -> None:
        x = random(ROWS, 2 * width, dtype=dtype) * 4
        function = getattr(kernels, name)
        theirs = getattr(activation_definition, name)(x)
        torch.testing.assert_close(function(x), theirs, rtol=2**-7 if dtype == torch.bfloat16 else 5e-7, atol=1e-6)
        assert_rows_alone(function, x)

    @pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
    def test_float32_is_exact_to_a_few_units(self, kernels: RowKernels, name: str) -> None:
        """Even where torch's own formulas lose all digits: below -4."""
        x = torch.linspace(-6.0, 12.0, 20001)
        exact = x.double()
        if name == "gelu":
            exact = exact * torch.special.erfc(-exact * 0.5**0.5) / 2
        else:
            exact = exact * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3))
        error = ((getattr(kernels, name)(x) - exact) / exact).nan_to_num_()
        assert error[x > -1].abs().max() < 5e-7 and error.abs().max() < 4e-6

    def test_silu_in_float32_is_exact_to_a_few_units(self, kernels: RowKernels) -> None:
        x = torch.linspace(-80.0, 80.0, 20000)
        ours = kernels.silu_and_mul(torch.stack((x, torch.ones_like(x)), 1))[:, 0]
        assert (ours / (x.double() * x.double().sigmoid()) - 1).abs().max() < 3e-7

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bits_do_not_depend_on_the_place(self, kernels: RowKernels, dtype: torch.dtype) -> None:
        for name in ("gelu", "gelu_tanh"):
            x = random(1, 1100, dtype=dtype) * 3
            whole = getattr(kernels, name)(x)
            for start in (1, 3, 511, 600):
                assert same_bits(getattr(kernels, name)(x[:, start:]), whole[:, start:])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_far_out_and_not_finite(self, kernels: RowKernels, name: str, dtype: torch.dtype) -> None:
        x = torch.tensor([[-1000.0, -90.0, 0.0, 90.0, 1000.0, torch.inf, -torch.inf, torch.nan]], dtype=dtype)
        if name.endswith("_and_mul"):
            x = torch.cat((x, torch.ones_like(x)), -1)
        ours, theirs = getattr(kernels, name)(x), getattr(activation, name)(x)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-30, equal_nan=True)

    def test_rows_with_strides(self, kernels: RowKernels) -> None:
        x = random(9, 100)[:, 3:67]
        for name in ACTIVATIONS:
            assert same_bits(getattr(kernels, name)(x), getattr(kernels, name)(x.clone()))


class TestRopeAndCache:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_dim", [16, 24, 64, 256])
    @pytest.mark.parametrize(
        ("with_norms", "with_angles"), [(None, False), (None, True), ("narrow", True), ("wide", True)]
    )
    def test_equals_torch(
        self, kernels: RowKernels, head_dim: int, with_norms: str | None, with_angles: bool, dtype: torch.dtype
    ) -> None:
        heads, kv_heads, block_size = 6, 3, 8
        whole = random(ROWS, (heads + 2 * kv_heads) * head_dim + 5, dtype=dtype)
        qkv = whole[:, 2:-3]  # rows are not adjacent
        weights = [random(head_dim, dtype=torch.float32 if with_norms == "wide" else dtype, seed=n) for n in (0, 3)]
        norms = HeadNorms(*weights, 1e-6)
        angle = random(ROWS, head_dim // 2, seed=2) * 3
        slots = torch.randperm(10 * block_size, generator=torch.Generator().manual_seed(0))[:ROWS]

        def run(version: Callable[..., Tensor], first: int, last: int) -> tuple[Tensor, Tensor]:
            cache = torch.zeros((10, 3, 2, kv_heads, block_size, head_dim), dtype=dtype)[:, 1]
            part = slice(first, last)
            angles = (angle[part].cos(), angle[part].sin()) if with_angles else None
            query = version(qkv[part], heads, norms if with_norms else None, angles, cache, slots[part])
            return query, cache

        ours, theirs = run(kernels.rope_and_cache, 0, ROWS), run(rope.rope_and_cache, 0, ROWS)
        for left, right in zip(ours, theirs, strict=True):
            tolerance = (2e-2 if dtype == torch.bfloat16 else 1e-5) if with_norms else 0.0
            torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
        for threads, (first, last) in itertools.product((1, 2, 3), ((0, 1), (5, 7), (3, 36))):
            torch.set_num_threads(threads)
            query, cache = run(kernels.rope_and_cache, first, last)
            assert same_bits(query, ours[0][first:last])
            for slot in slots[first:last].tolist():
                place = (slot // block_size, slice(None), slice(None), slot % block_size)
                assert same_bits(cache[place], ours[1][place])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_an_int8_cache(kernels: RowKernels, dtype: torch.dtype) -> None:
    """Without norms, so that keys are rotated to the same bits and rounded to the same numbers."""
    heads, kv_heads, size, block_size, rows = 6, 3, 24, 8, 20
    qkv = random(rows, (heads + 2 * kv_heads) * size, dtype=dtype)
    angle = random(rows, size // 2, seed=1)
    slots = torch.randperm(5 * block_size, generator=torch.Generator().manual_seed(2))[:rows]
    found = []
    for version in (kernels.rope_and_cache, rope.rope_and_cache):
        cache = torch.zeros(5, 2, kv_heads, block_size, size + 4, dtype=torch.int8)
        found.append((version(qkv.clone(), heads, None, (angle.cos(), angle.sin()), cache, slots), cache))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1]) and found[0][1].any()


class TestQuantiseRows:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_equals_torch_to_the_bit(self, kernels: RowKernels, width: int, dtype: torch.dtype) -> None:
        x = random(ROWS, width, dtype=dtype) * torch.logspace(-30, 30, ROWS)[:, None].to(dtype)
        x[3] = 0.0
        for part in (x, x[:, : width // 2 + 1]):
            for ours, theirs in zip(kernels.quantise_rows(part), linear_int8.quantise_rows(part), strict=True):
                assert torch.equal(ours, theirs)
        assert_rows_alone(lambda rows: kernels.quantise_rows(rows)[0], x)
        assert_rows_alone(lambda rows: kernels.quantise_rows(rows)[1], x)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_is_not_finite_shows_in_the_scale(self, kernels: RowKernels, dtype: torch.dtype) -> None:
        x = random(3, 50, dtype=dtype)
        x[0, 49], x[1, 3] = torch.nan, -torch.inf
        _, scales = kernels.quantise_rows(x)
        assert scales[0].isnan() and scales[1] == torch.inf and scales[2].isfinite()


def test_no_rows(kernels: RowKernels) -> None:
    none = torch.empty(0, 24)
    assert kernels.rms_norm(none, torch.ones(24), 1e-6).shape == (0, 24)
    assert kernels.silu_and_mul(none).shape == (0, 12)
    assert kernels.gelu(none).shape == (0, 24)
    assert kernels.quantise_rows(none)[0].shape == (0, 24)
