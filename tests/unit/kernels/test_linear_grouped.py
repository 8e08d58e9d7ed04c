"""Weights of 4 and 8 bits in groups: every variant against the definition, and equal bits in any batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.linear_grouped import GroupQuantPacker
from serve_llm.kernels.linear_grouped import GroupQuantWeight, merge_rows, pack_grouped

PATH = library.find()
VARIANTS = library.Library(PATH).variants if PATH is not None else ()
pytestmark = pytest.mark.skipif(PATH is None, reason="there are no compiled kernels")
CODES = ("4 bits", "8 bits", "table", "float8")
SHAPES = [(1, 8, 8), (37, 64, 32), (100, 200, 40), (64, 61, 64), (16, 512, 128), (130, 96, 96)]


@pytest.fixture(params=VARIANTS)
def packer(request: pytest.FixtureRequest) -> GroupQuantPacker:
    assert PATH is not None
    return GroupQuantPacker(library.Library(PATH, request.param))


def random_weight(outputs: int, inputs: int, group_size: int, codes: str, offset: int = 0) -> GroupQuantWeight:
    generator = torch.Generator().manual_seed(outputs + inputs)
    bits = 8 if codes in ("8 bits", "float8") else 4
    num_groups = -(-(inputs + offset) // group_size)
    found = torch.randint(0, 2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    if codes == "float8":
        found -= (found & 0x7F == 0x7F).byte()  # no NaN
    return GroupQuantWeight(
        found,
        bits,
        torch.randn((outputs, num_groups), generator=generator) / 2**bits,
        group_size,
        table=torch.randn(16, generator=generator) * 8 if codes == "table" else None,
        is_float8=codes == "float8",
        offset=offset,
    )


def random_rows(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((rows, inputs), generator=torch.Generator().manual_seed(rows)).to(dtype)


def rounds_rows(packer: GroupQuantPacker, weight: GroupQuantWeight) -> bool:
    """Return whether rows of bfloat16 are rounded to int8."""
    if weight.is_float8 or weight.table is not None:
        return False
    variant = library.VARIANTS[packer.variant_index]
    return variant in (("avx512_bf16", "amx") if weight.bits == 8 else ("avx2", "avx512", "avx512_bf16"))


def round_rows(x: Tensor, weight: GroupQuantWeight) -> Tensor:
    """Return rows x (rows, inputs) in float64, each group rounded to multiples of its largest magnitude / 127."""
    rounded = torch.zeros_like(x, dtype=torch.float64)
    groups = (torch.arange(x.shape[1]) + weight.offset) // weight.group_size
    for group in groups.unique():
        columns = groups == group
        part = x[:, columns].double()
        scale = part.abs().amax(1, keepdim=True) / 127
        rounded[:, columns] = (part / torch.where(scale > 0, scale, 1.0)).round() * scale
    return rounded


def assert_close(packer: GroupQuantPacker, weight: GroupQuantWeight, bias: Tensor | None = None, rows: int = 5) -> None:
    assert packer.packs(weight)
    x = random_rows(rows, weight.shape[1])
    dense = weight.dequantise().double()
    expected = x.double() @ dense.T + (0 if bias is None else bias.double())
    bound = x.double().abs() @ dense.abs().T + 1e-3
    assert ((packer.pack(weight, bias)(x) - expected).abs() / bound).max() < 3e-6
    assert torch.allclose(pack_grouped(weight, bias, torch.float32)(x), expected.float(), atol=1e-3)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(packer: GroupQuantPacker, shape: tuple[int, int, int], codes: str) -> None:
    outputs, inputs, group_size = shape
    weight = random_weight(outputs, inputs, group_size, codes)
    assert_close(packer, weight)
    assert_close(packer, weight, torch.randn(outputs), rows=1)
    assert_close(packer, weight, torch.randn(outputs), rows=31)


@pytest.mark.parametrize("kind", ["float8", "whole table", "fine table", "4 bits", "8 bits", "zeros", "minimums"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_bfloat16(packer: GroupQuantPacker, shape: tuple[int, int, int], kind: str) -> None:
    """Some processors multiply values that bfloat16 represents exactly as such, which rounds sums slightly differently;
    for integer codes, most round the rows to int8."""
    outputs, inputs, group_size = shape
    codes = {"whole table": "table", "fine table": "table", "zeros": "4 bits", "minimums": "4 bits"}.get(kind, kind)
    weight = random_weight(outputs, inputs, group_size, codes)
    if kind in ("zeros", "minimums"):
        weight = replace(weight, **{kind: torch.randn(weight.scales.shape)})
    if kind == "whole table":
        weight = replace(weight, table=torch.arange(16.0) * 17 - 127)
    x = random_rows(13, inputs, torch.bfloat16)
    dense = weight.dequantise().double()
    found = packer.pack(weight, None)(x).double()
    bound = x.double().abs() @ dense.abs().T + 1e-3
    multiplied = round_rows(x, weight) if rounds_rows(packer, weight) else x.double()
    assert ((found - multiplied @ dense.T).abs() / bound).max() < 2**-8  # the result is rounded to bfloat16
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(1))
    ordered = packer.pack(replace(weight, order=order), None)(x)
    assert torch.equal(ordered, packer.pack(weight, None)(x[:, order]))


@pytest.mark.parametrize("codes", CODES)
def test_zeros_minimums_order_and_halves(packer: GroupQuantPacker, codes: str) -> None:
    weight = random_weight(50, 96, 32, codes)
    more = torch.randn(weight.scales.shape)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    assert_close(packer, replace(weight, zeros=more * 4))
    assert_close(packer, replace(weight, minimums=more))
    assert_close(packer, replace(weight, order=order))
    tiny = torch.tensor([6e-8, 6.1e-5, -2.0])  # subnormal float16, the smallest normal one
    halves = replace(weight, scales=(weight.scales.half().float() * tiny.half().float()).half().float())
    assert_close(packer, replace(halves, zeros=more.half().float()))


@pytest.mark.parametrize("codes", CODES)
def test_a_part_that_begins_amid_a_group(packer: GroupQuantPacker, codes: str) -> None:
    assert_close(packer, random_weight(40, 88, 32, codes, offset=8))
    assert not packer.packs(random_weight(40, 88, 32, codes, offset=3))
    assert not packer.packs(random_weight(40, 88, 22 if codes in ("8 bits", "float8") else 20, codes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_float8_number(packer: GroupQuantPacker, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(128, 2).repeat(1, 2)
    scale = torch.ones(1, 1)
    weight = GroupQuantWeight(codes, 8, scale.expand(128, 1), 4, is_float8=True)
    expected = codes.view(torch.float8_e4m3fn).float()
    for column in range(4):
        x = torch.zeros(1, 4, dtype=dtype)
        x[0, column] = 1.0
        found = packer.pack(weight, None)(x)[0].float()
        has_nan = expected.isnan().any(1)  # any other weight of an output is multiplied by zero, so NaN stays NaN
        assert torch.equal(found[~has_nan], expected[~has_nan, column]) and found[has_nan].isnan().all()
        assert has_nan.sum() == 2
    assert scale == 1.0, "NaN is not written into the scale of the tensor"


@pytest.mark.parametrize("codes", ["4 bits", "8 bits"])
def test_rows_that_cannot_be_rounded(packer: GroupQuantPacker, codes: str) -> None:
    layer = packer.pack(random_weight(20, 64, 32, codes), None)
    x = random_rows(6, 64, torch.bfloat16)
    wanted = layer(x)
    x[1, 40] = torch.nan
    x[2, 3] = torch.inf
    x[3, 63] = -torch.inf
    x[4] = 0
    x[5] *= 1e-38
    found = layer(x)
    assert torch.equal(found[0], wanted[0])
    assert not found[1:4].isfinite().any()
    assert (found[4] == 0).all()
    assert (found[5].abs() < 1e-35).all()


@pytest.mark.parametrize("codes", ["table", "float8"])
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.bfloat16])
def test_narrow_scales_and_divisors(packer: GroupQuantPacker, dtype: torch.dtype, codes: str) -> None:
    weight = random_weight(50, 96, 16, codes)
    scales = weight.scales.abs().to(dtype)
    narrow = replace(weight, scales=scales if scales.element_size() == 1 else scales.float())
    assert_close(packer, narrow)
    codes_and_scales = packer.pack(narrow, None)._tensors[:2]  # type: ignore[attr-defined]
    outputs = -(-50 // packer.columns) * packer.columns
    num_bytes = [outputs * 96 * weight.bits // 8, outputs * 6 * scales.element_size()]
    assert [tensor.nbytes for tensor in codes_and_scales] == num_bytes
    divisors = torch.rand(50, generator=torch.Generator().manual_seed(1)) + 0.5
    assert_close(packer, replace(narrow, divisors=divisors), torch.randn(50), rows=2)
    whole = narrow.scales.float() / divisors.unsqueeze(1)
    same = replace(narrow, scales=whole).dequantise()
    assert torch.equal(replace(narrow, divisors=divisors).dequantise(), same)


def test_extreme_scales(packer: GroupQuantPacker) -> None:
    weight = replace(random_weight(4, 32, 8, "table"), table=torch.arange(16.0))
    exponents = torch.tensor([[0, 1, 127, 130]] * 3 + [[255, 127, 127, 127]], dtype=torch.uint8)
    powers = replace(weight, scales=exponents.view(torch.float8_e8m0fnu))
    found = packer.pack(powers, None)(torch.ones(1, 32))[0]
    expected = powers.dequantise().sum(1)
    assert torch.allclose(found[:3], expected[:3], rtol=1e-5) and found[3].isnan() and expected[3].isnan()
    tiny = torch.zeros(1, 32)
    tiny[0, 0] = 2.0**100
    assert torch.equal(packer.pack(powers, None)(tiny)[0, :3], (powers.dequantise()[:3, 0] * 2.0**100))
    nan = torch.full((4, 4), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert packer.pack(replace(weight, scales=nan), None)(torch.ones(1, 32)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("inputs", "group_size"), [(160, 32), (1208, 640)])  # the latter exceeds a block of codes
def test_a_rows_bits_do_not_depend_on_the_others(
    packer: GroupQuantPacker, inputs: int, group_size: int, codes: str, dtype: torch.dtype
) -> None:
    weight = random_weight(150, inputs, group_size, codes, offset=8)
    if codes in ("table", "float8"):
        weight = replace(weight, table=None if weight.table is None else weight.table.bfloat16().float())
    else:
        weight = replace(weight, zeros=torch.randn(weight.scales.shape))
    layer = packer.pack(weight, torch.randn(150))
    x = random_rows(300, inputs, dtype)
    whole = layer(x)
    for rows in (1, 2, 3, 5, 7, 11, 12, 13, 24, 25, 31, 240, 241):
        assert torch.equal(layer(x[:rows]), whole[:rows])
        assert torch.equal(layer(x[300 - rows :]), whole[300 - rows :])


def test_weights_of_the_same_input_merge() -> None:
    one, two = (replace(random_weight(n, 64, 32, "4 bits"), zeros=torch.randn(n, 2)) for n in (5, 7))
    assert one.is_like(two) and not one.is_like(replace(two, zeros=None))
    assert not one.is_like(replace(two, order=torch.arange(64)))
    assert not one.is_like(replace(two, scales=two.scales.to(torch.float8_e4m3fn)))
    assert torch.equal(merge_rows([one, two]).dequantise(), torch.cat([one.dequantise(), two.dequantise()]))
