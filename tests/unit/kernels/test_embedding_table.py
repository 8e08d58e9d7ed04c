"""Rows looked up in packed matrices are those of the matrix, in every variant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from serve_llm.kernels import embedding_table, registry
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.linear import Packer
from serve_llm.kernels.cpu.linear_grouped import GroupQuantPacker
from serve_llm.kernels.linear_grouped import GroupQuantWeight
from serve_llm.kernels.linear_int8 import quantise_rows

PATH = library.find()
VARIANTS = library.Library(PATH).variants if PATH is not None else ()
needs_kernels = pytest.mark.skipif(PATH is None, reason="there are no compiled kernels")
IDS = torch.tensor([3, 0, 36, 17, 17, 31] * 50)  # more than are looked up at a time
FORMS = ("4 bits", "8 bits", "zeros", "minimums", "table", "float8", "divisors")
SCALES = {
    "float16": torch.tensor([1.5, -(2.0**-14), 2.0**-24, 65504.0, 1023 * 2.0**-24]).half(),
    "bfloat16": torch.tensor([1.5, 2.0**-100, -3.0e38, 2.0**-133]).bfloat16(),
    "e8m0": torch.tensor([127, 0, 254, 100], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "e4m3": torch.tensor([1.5, -448.0, 2.0**-9, 7 * 2.0**-9, 2.0**-6]).to(torch.float8_e4m3fn),
}


@pytest.fixture(params=VARIANTS)
def compiled(request: pytest.FixtureRequest) -> library.Library:
    assert PATH is not None
    return library.Library(PATH, request.param)


def random_weight(form: str) -> GroupQuantWeight:
    """Return 37 outputs and 96 inputs in groups of 32."""
    generator = torch.Generator().manual_seed(1)
    bits = 8 if form in ("8 bits", "minimums", "float8") else 4
    codes = torch.randint(0, 2**bits, (37, 96), generator=generator, dtype=torch.uint8)
    if form == "float8":
        codes -= ((codes & 0x7F) == 0x7F).byte()  # no NaN
    weight = GroupQuantWeight(codes, bits, torch.randn((37, 3), generator=generator), 32, is_float8=form == "float8")
    if form in ("zeros", "minimums"):
        weight = replace(weight, **{form: torch.randn((37, 3), generator=generator)})
    if form in ("table", "divisors"):
        weight = replace(weight, table=torch.randn(16, generator=generator))
    if form == "divisors":
        weight = replace(weight, divisors=torch.rand(37, generator=generator) + 1)
    return weight


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_groups(form: str, compiled: library.Library) -> None:
    weight = random_weight(form)
    packed = GroupQuantPacker(compiled).pack_table(weight, None, torch.float32)
    assert torch.equal(packed.look_up(IDS), weight.dequantise()[IDS])
    x = torch.randn(3, 96)
    assert torch.allclose(packed.multiply(x), x @ weight.dequantise().T, rtol=1e-3, atol=1e-2)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SCALES)
def test_scales_of_each_type(kind: str, dtype: torch.dtype, compiled: library.Library) -> None:
    """Subnormal numbers and the largest ones among them."""
    weight = random_weight("4 bits")
    scales = SCALES[kind].view(torch.uint8).view(len(SCALES[kind]), -1)
    chosen = scales[torch.arange(37 * 3) % len(scales)].view(SCALES[kind].dtype).view(37, 3)
    weight = replace(weight, scales=chosen)
    packed = GroupQuantPacker(compiled).pack_table(weight, None, dtype)
    assert torch.equal(packed.look_up(IDS), weight.dequantise().to(dtype)[IDS])


@needs_kernels
def test_an_order_of_inputs(compiled: library.Library) -> None:
    weight = replace(random_weight("zeros"), order=torch.randperm(96, generator=torch.Generator().manual_seed(2)))
    packed = GroupQuantPacker(compiled).pack_table(weight, None, torch.bfloat16)
    assert torch.equal(packed.look_up(IDS), weight.dequantise().bfloat16()[IDS])


@needs_kernels
@pytest.mark.parametrize("inputs", [1, 61, 64])
def test_int8(inputs: int, compiled: library.Library) -> None:
    numbers = torch.randint(-127, 128, (37, inputs), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    scales = torch.rand(37, 1)
    packed = Packer(compiled).pack_int8_table(numbers, scales, None, torch.bfloat16, quantise_rows)
    assert torch.equal(packed.look_up(IDS), (numbers * scales).bfloat16()[IDS])
    x = torch.randn(3, inputs).bfloat16()
    assert torch.equal(packed.multiply(x), Packer(compiled).pack_int8(numbers, scales)(x))


def all_tables(kernels: registry.Kernels, rows: int) -> list[tuple[embedding_table.EmbeddingTable, Tensor]]:
    """Return tables of this many rows, and the matrices."""
    numbers, scales = torch.ones((rows, 96), dtype=torch.int8), torch.ones(rows, 1)
    weight = random_weight("8 bits").map_rows(lambda tensor: tensor[:rows])
    return [
        (kernels.pack_int8_table(numbers, scales, None, torch.float32), numbers.float()),
        (kernels.pack_grouped_table(weight, None, torch.float32), weight.dequantise()),
    ]


def test_the_definitions() -> None:
    for made, matrix in all_tables(registry.PORTABLE, 37):
        assert torch.equal(made.look_up(IDS), matrix[IDS])
        assert torch.allclose(made.multiply(torch.ones(2, 96)), matrix.sum(1).expand(2, -1), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=needs_kernels)])
def test_without_rows(is_compiled: bool) -> None:
    """As on a rank that gets no part of a small vocabulary."""
    kernels = registry.choose(torch.device("cpu"), torch.float32, {16}) if is_compiled else registry.PORTABLE
    for made, _ in all_tables(kernels, 0):
        assert torch.equal(made.look_up(torch.tensor([0, 0])), torch.zeros(2, 96))
        assert made.multiply(torch.ones(2, 96)).shape == (2, 0)
