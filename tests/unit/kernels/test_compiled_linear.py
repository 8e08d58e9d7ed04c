"""Linear layers in every compiled variant that this processor supports: equal to the definition, and a row's bits do
not depend on other rows, the number of threads, or the number of rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from reference import linear as definition
from reference import linear_int8 as definition_int8
from serve_llm.kernels import linear, registry
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.cpu.linear import Packer
from serve_llm.kernels.invariance import PaddedLinear

COMPILED = library.find()
PACKERS = {} if COMPILED is None else {name: Packer(Library(COMPILED, name)) for name in Library(COMPILED).variants}
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(97, 53), (64, 2600), (331, 60), (84, 19), (7, 1), (1, 7)]  # outputs, inputs
ROWS = [*range(1, 15), 25, 31, 253, 300]

pytestmark = pytest.mark.skipif(COMPILED is None, reason="no C++ compiler at installation")


@pytest.fixture(params=PACKERS)
def packer(request: pytest.FixtureRequest) -> Packer:
    return PACKERS[request.param]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int8_weights(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    numbers = torch.randint(-127, 128, (outputs, inputs), generator=torch.Generator().manual_seed(3))
    return numbers.to(torch.int8), random(outputs, 1, seed=4).abs() / 100


def pack(packer: Packer, kind: str, outputs: int, inputs: int) -> tuple[linear.Linear, torch.dtype]:
    """Return a layer with a bias, and the type of its rows."""
    if kind == "int8":
        return packer.pack_int8(*int8_weights(outputs, inputs), random(outputs, dtype=torch.bfloat16)), torch.bfloat16
    dtype: torch.dtype = getattr(torch, kind)
    return packer.pack(random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype)), dtype


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_alone(packer: Packer, shape: tuple[int, int], kind: str) -> None:
    layer, dtype = pack(packer, kind, *shape)
    x = random(max(ROWS), shape[1], dtype=dtype, seed=1)
    whole = layer(x)
    for count in ROWS:
        first = 7 * count % (len(x) - count + 1)
        assert torch.equal(layer(x[first : first + count]), whole[first : first + count]), f"{count} rows"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_threads_do_not_show(packer: Packer, kind: str) -> None:
    layer, dtype = pack(packer, kind, 331, 130)
    x, before, results = random(5, 130, dtype=dtype, seed=1), torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(layer(x))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_equals_the_definition(packer: Packer, rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias, x = random(*shape, dtype=dtype), random(shape[0], dtype=dtype), random(rows, shape[1], seed=1)
    for added in (bias, None):
        ours = packer.pack(weight, added)(x.to(dtype))
        exact = definition.pack(weight.double(), None if added is None else added.double())(x.to(dtype).double())
        assert ours.dtype == dtype and ours.shape == (rows, shape[0])
        scale = weight.double().norm(dim=1) * x.norm(dim=1, keepdim=True) + exact.abs()
        assert ((ours - exact).abs() / scale).max() < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_equals_the_definition(packer: Packer, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, scale = int8_weights(*shape)
    bias, x = random(shape[0], dtype=dtype), random(30, shape[1], seed=1) * torch.logspace(-30, 30, 30)[:, None]
    ours = packer.pack_int8(weight, scale, bias)(x.to(dtype))
    expected = definition_int8.pack_int8(weight, scale, bias)(x.to(dtype))
    error = (ours.float() - expected.float()) / expected.float().abs().amax(1, keepdim=True)
    assert ours.dtype == dtype and error.abs().max() < (1e-6 if dtype == torch.float32 else 8e-3)


def test_int8_numbers_and_their_sums_are_exact(packer: Packer) -> None:
    weight, scale = torch.full((40, 4864), -127, dtype=torch.int8), torch.ones(40, 1)
    weight[::2] = 127
    x = torch.full((3, 4864), 127.0)
    x[1] = -127.0
    assert torch.equal(packer.pack_int8(weight, scale)(x), (x.double() @ weight.double().T).float())


def test_int8_weights_of_other_layouts(packer: Packer) -> None:
    weight, scale = int8_weights(97, 53)
    x = random(3, 53)
    expected = packer.pack_int8(weight, scale)(x)
    beside = torch.full((97, 60), 127, dtype=torch.int8)
    beside[:, 7:] = weight
    for same in (beside[:, 7:], weight.T.contiguous().T):
        assert torch.equal(packer.pack_int8(same, scale)(x), expected)


@pytest.mark.parametrize("inputs", [1, 15, 16, 64, 131, 4864])
def test_sums_of_int8_rows(packer: Packer, inputs: int) -> None:
    weight = torch.randint(-128, 128, (7, inputs + 3), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    weight[5], weight[6] = -128, 127
    assert torch.equal(packer.sum_rows(weight[:, 3:]), weight[:, 3:].sum(1, dtype=torch.int32))


def test_layouts_of_weights_and_rows(packer: Packer) -> None:
    weight, x = random(53, 97).T, random(3, 53)
    expected = packer.pack(weight.contiguous())(x)
    assert torch.equal(packer.pack(weight)(x), expected)
    beside = random(97, 60)
    beside[:, 7:] = weight
    assert torch.equal(packer.pack(beside[:, 7:])(x), expected)
    assert torch.equal(packer.pack(weight)(torch.cat((x, x), 1)[:, 53:]), expected)
    assert torch.equal(packer.pack(weight)(x.T.contiguous().T), expected)
    half, wide = weight[:, :10].bfloat16(), random(3, 21).bfloat16()  # rows that are not aligned to vectors
    assert torch.equal(packer.pack(half)(wide[:, 3:13]), packer.pack(half)(wide[:, 3:13].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [(97,), (5, 0, 92), (1, 31, 65), (64, 32, 1)])
def test_weights_side_by_side(packer: Packer, counts: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, bias, x = random(97, 53, dtype=dtype), random(97, dtype=dtype), random(3, 53, dtype=dtype)
    first, *more = weight.split(counts)
    expected = packer.pack(weight, bias)(x)
    assert torch.equal(packer.pack(first, bias, more)(x), expected)
    assert torch.equal(packer.pack(first.T.contiguous().T, bias, more)(x), expected)
    assert torch.equal(linear.pack(first, bias, more)(x), linear.pack(weight, bias)(x))


def test_nothing(packer: Packer) -> None:
    bias = random(97)
    assert packer.pack(random(97, 53), bias)(torch.empty(0, 53)).shape == (0, 97)
    assert torch.equal(packer.pack(torch.empty(97, 0), bias)(torch.empty(2, 0)), bias.expand(2, 97))
    assert packer.pack(torch.empty(0, 53))(torch.empty(2, 53)).shape == (2, 0)
    assert packer.pack(torch.empty(9, 0), None, [torch.empty(4, 0)])(torch.empty(2, 0)).shape == (2, 13)


def test_what_is_not_finite_stays_in_its_row(packer: Packer) -> None:
    x = random(20, 64)
    layer = packer.pack(random(40, 64))
    expected = layer(x)
    x[3, 5], x[7] = torch.nan, torch.inf
    y = layer(x)
    assert not y[3].isfinite().any() and not y[7].isfinite().any()
    kept = [row for row in range(20) if row not in (3, 7)]
    assert torch.equal(y[kept], expected[kept])


def test_a_kernel_that_is_not_invariant_is_caught_where_a_model_is_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = Packer.pack

    def fake(self: Packer, weight: Tensor, bias: Tensor | None = None, merged: Sequence[Tensor] = ()) -> linear.Linear:
        layer = real(self, weight, bias, merged)
        return lambda x: layer(x) if len(x) > 1 else layer(x) * (1 + 2**-7)

    monkeypatch.setattr(Packer, "pack", fake)
    caplog.set_level(logging.WARNING)
    layer = registry.choose(torch.device("cpu"), torch.bfloat16, {64}).pack(random(97, 53, dtype=torch.bfloat16))
    (line,) = caplog.messages
    assert "97 x 53 in bfloat16" in line and "32 rows at a time" in line
    x = random(40, 53, dtype=torch.bfloat16, seed=1)
    assert torch.equal(layer(x)[7:8], layer(x[7:8]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_model_is_built_with_passes_the_self_check(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    chosen = registry.choose(torch.device("cpu"), dtype, {64})
    for shape in SHAPES:
        assert not isinstance(chosen.pack(random(*shape, dtype=dtype)), PaddedLinear)
        assert not isinstance(chosen.pack_int8(*int8_weights(*shape), None), PaddedLinear)
    assert not caplog.messages


def test_the_log_names_the_instruction_set(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    registry.choose(torch.device("cpu"), torch.bfloat16, {64})
    assert COMPILED is not None
    assert caplog.messages == [f"CPU kernels: compiled for {Library(COMPILED).variant}"]


def test_the_variable_of_onednn_limits_the_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = library.list_allowed_variants
    assert allowed({}) == allowed({"ONEDNN_MAX_CPU_ISA": "DEFAULT"}) == library.VARIANTS
    assert allowed({"ONEDNN_MAX_CPU_ISA": "avx512_core"}) == ("baseline", "avx2", "avx512")
    assert allowed({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"})[-1] == "avx512_bf16"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    assert COMPILED is not None and Library(COMPILED).variants == ("baseline",)
