"""Weights of 4 and 8 bits on a GPU: in the interpreter against the definition; compiled, they fit every GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from serve_llm.kernels import activation, linear, linear_grouped, linear_int8, moe
from serve_llm.kernels.linear_grouped import GroupQuantWeight
from support.experts import make_case
from support.grouped import FORMS, make_weight
from support.matrix import mostly_slow
from support.triton import NO_TRITON, assert_fits, compile_for, record

pytest.importorskip("triton", reason=NO_TRITON)
from serve_llm.kernels.triton import linear_grouped as ours
from serve_llm.kernels.triton.linear_grouped import pack_grouped, pack_int8
from serve_llm.kernels.triton.moe import pack_experts

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def random_rows(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((rows, inputs), generator=torch.Generator().manual_seed(rows)).to(dtype)


def assert_right(weight: GroupQuantWeight, rows: int, dtype: torch.dtype, bias: bool = False) -> None:
    x = random_rows(rows, weight.shape[1], dtype)
    added = random_rows(1, weight.shape[0], dtype)[0] if bias else None
    expected = linear_grouped.pack_grouped(weight, added, dtype)(x)
    found = pack_grouped(weight, added, dtype)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", mostly_slow([torch.float32, torch.bfloat16], [torch.bfloat16]))
def test_equals_the_definition(form: str, dtype: torch.dtype) -> None:
    """Few rows, whose sums are split, and more rows than a tile has; one group for all inputs, wide groups and narrow
    ones."""
    for rows, outputs, inputs, group_size in ((3, 40, 1100, 32), (1, 7, 60, 60), (150, 70, 200, 128), (2, 5, 80, 16)):
        assert_right(make_weight(form, outputs, inputs, group_size), rows, dtype, bias=rows == 3)


@pytest.mark.parametrize("form", mostly_slow(FORMS, ["int4 zeros", "mxfp4"]))
def test_many_rows_multiply_an_unpacked_weight(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "UNPACKED_ROWS", 6)
    for outputs, inputs, group_size, offset in ((40, 1100, 32, 0), (7, 60, 60, 0), (9, 150, 128, 96), (9, 150, 20, 3)):
        weight = make_weight(form, outputs, inputs, group_size, offset)
        for dtype in (torch.float32, torch.bfloat16):
            assert_right(weight, 6, dtype, bias=inputs == 60)


@pytest.mark.parametrize("form", mostly_slow(FORMS, ["int4 zeros", "mxfp4"]))
def test_parts_of_groups_and_odd_groups(form: str) -> None:
    for group_size, offset in ((128, 96), (32, 7), (20, 3), (96, 0)):
        assert_right(make_weight(form, 9, 150, group_size, offset), 5, torch.float32)
    assert_right(make_weight(form, 9, 150, 32), 2, torch.float16)


def test_an_order_of_inputs_and_narrow_scales() -> None:
    weight = make_weight("int4 zeros", 30, 96, 32)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    assert_right(replace(weight, order=order), 4, torch.float32)
    assert_right(replace(weight, scales=weight.scales.half().float()), 4, torch.float32)
    assert_right(replace(weight, scales=weight.scales.bfloat16().float()), 4, torch.float32)


def test_every_float8_number_and_nan() -> None:
    """Each number is alone in its group, so that NaN does not spread."""
    codes = torch.arange(256, dtype=torch.uint8).view(128, 2)
    weight = GroupQuantWeight(codes, 8, torch.ones(128, 2), 1, is_float8=True)
    for column in range(2):
        x = torch.zeros(1, 2)
        x[0, column] = 1.0
        values = codes.view(torch.float8_e4m3fn).float()
        expected = torch.where(values.isnan().any(1), torch.nan, values[:, column])
        assert torch.equal(pack_grouped(weight, None, torch.float32)(x)[0].nan_to_num(777), expected.nan_to_num(777))


def test_every_8_bit_scale() -> None:
    codes = torch.full((255, 1), 2, dtype=torch.uint8)  # 1.0
    exponents = torch.arange(255, dtype=torch.uint8).view(255, 1).view(torch.float8_e8m0fnu)
    weight = GroupQuantWeight(codes, 4, exponents, 1, table=linear_grouped.build_e2m1_table(codes.device))
    found = pack_grouped(weight, None, torch.float32)(torch.ones(1, 1))[0]
    assert torch.equal(found, exponents.float()[:, 0])
    broken = replace(weight, scales=torch.full((255, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert pack_grouped(broken, None, torch.float32)(torch.ones(1, 1)).isnan().all()


def test_without_numbers() -> None:
    bias = torch.arange(4.0)
    empty = GroupQuantWeight(torch.empty((4, 0), dtype=torch.uint8), 4, torch.empty(4, 0), 32)
    assert torch.equal(pack_grouped(empty, bias, torch.float32)(torch.empty(3, 0)), bias.expand(3, 4))
    none = GroupQuantWeight(torch.empty((0, 8), dtype=torch.uint8), 4, torch.empty(0, 1), 32)
    assert pack_grouped(none, None, torch.float32)(torch.ones(3, 8)).shape == (3, 0)
    assert pack_grouped(make_weight("int4", 8, 64, 32), None, torch.float32)(torch.empty(0, 64)).shape == (0, 8)


def test_int8_without_rounding_the_rows() -> None:
    numbers = torch.randint(-127, 128, (20, 70), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    scale, bias, x = torch.rand(20, 1) / 500, torch.rand(20), random_rows(5, 70)
    found = pack_int8(numbers, scale, bias)(x)
    torch.testing.assert_close(found, x @ (numbers * scale).T + bias)
    assert (found - linear_int8.pack_int8(numbers, scale, bias)(x)).abs().max() < 0.05


@pytest.mark.parametrize("form", mostly_slow(["int4 zeros", "fp8"], ["int4 zeros"]))
def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    """With splits and without."""
    for outputs, inputs, group_size in ((40, 1100, 32), (70, 200, 128)):
        layer = pack_grouped(make_weight(form, outputs, inputs, group_size), None, torch.float32, batch_invariant=True)
        x = random_rows(150, inputs)
        whole = layer(x)
        for rows in (slice(0, 1), slice(149, 150), slice(3, 70)):
            assert torch.equal(layer(x[rows]), whole[rows])


@pytest.mark.parametrize("form", mostly_slow(FORMS, ["int4 zeros", "mxfp4"]))
def test_experts(form: str) -> None:
    case = make_case(9, 5, 2, 96, 32, torch.float32, bias=True)
    own = range(1, 4)
    made = {number: (make_weight(form, 64, 96, 32), make_weight(form, 96, 32, 16)) for number in range(5)}
    for number, (first, last) in made.items():  # otherwise all are alike
        made[number] = (first.map_rows(partial(torch.roll, shifts=number, dims=0)), last)

    def pairs(pack: object) -> list[tuple[linear.Linear, linear.Linear]]:
        assert case.biases is not None and callable(pack)
        biases = case.biases
        return [
            (pack(made[n][0], biases[0][n], torch.float32), pack(made[n][1], biases[1][n], torch.float32)) for n in own
        ]

    asked = case.x, case.weights, case.experts
    packed = pack_experts(pairs(pack_grouped), activation.silu_and_mul, own)
    expected = moe.pack_experts(pairs(linear_grouped.pack_grouped), activation.silu_and_mul, own)(*asked)
    assert not packed.reads_back
    torch.testing.assert_close(packed(*asked), expected, atol=1e-4, rtol=1e-4)
    alone = pack_experts(pairs(pack_grouped), activation.silu_and_mul, own, batch_invariant=True)
    assert torch.equal(alone(case.x[4:5], case.weights[4:5], case.experts[4:5]), alone(*asked)[4:5])


def test_experts_with_orders_and_of_several_forms() -> None:
    case = make_case(6, 2, 1, 64, 32, torch.float32)
    orders = [torch.randperm(64, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    up = make_weight("int4", 64, 64, 32)
    wide = replace(up, scales=up.scales.half().float())  # experts' scales have another dtype
    firsts = [replace(wide, order=orders[0]), replace(up, order=orders[1])]
    last = pack_grouped(make_weight("int8", 64, 32, 32), None, torch.float32)
    asked = case.x, case.weights, case.experts
    pairs = [(pack_grouped(first, None, torch.float32), last) for first in firsts]
    plain = [(linear.pack(first.dequantise()), last) for first in firsts]
    expected = moe.pack_experts(plain, activation.silu_and_mul, range(2))(*asked)
    found = pack_experts(pairs, activation.silu_and_mul, range(2))
    assert not found.reads_back
    torch.testing.assert_close(found(*asked), expected, atol=1e-4, rtol=1e-4)
    mixed = pack_experts([pairs[0], plain[1]], activation.silu_and_mul, range(2))
    assert mixed.reads_back
    torch.testing.assert_close(mixed(*asked), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [80, 90, *(pytest.param(number, marks=pytest.mark.long) for number in (89, 100, 120))]
)
def test_is_compiled_for_every_gpu(capability: int) -> None:
    """The formats of published checkpoints, for one row, few rows and prompts; and the experts of gpt-oss and
    DeepSeek."""
    forms = (("int4 zeros", 128), ("int4 minimums", 32), ("table", 32), ("mxfp4", 32), ("nvfp4", 16), ("fp8", 128))
    layers = [pack_grouped(make_weight(form, 256, 1024, size), None, torch.bfloat16) for form, size in forms]

    def launch(rows: int) -> None:
        for layer in layers:
            layer(torch.empty((rows, 1024), dtype=torch.bfloat16, device="meta"))

    def launch_experts(tokens: int, form: str, group_size: int) -> None:
        up, down = make_weight(form, 512, 256, group_size), make_weight(form, 256, 256, group_size)
        pair = pack_grouped(up, None, torch.bfloat16), pack_grouped(down, None, torch.bfloat16)
        packed = pack_experts([pair] * 4, lambda rows: rows[:, :256].contiguous(), range(4))
        x = torch.empty((tokens, 256), dtype=torch.bfloat16)
        packed(x, torch.empty((tokens, 2)), torch.zeros((tokens, 2), dtype=torch.int64))

    launches = record(lambda: [launch(rows) for rows in (1, 3, 500, 4096)])
    launches += record(lambda: [launch_experts(1, "mxfp4", 32), launch_experts(512, "fp8", 128)])
    found = compile_for(launches, capability)
    assert_fits(found, stack_bytes=64)
    products = [one for one in found if "_multiply" in one.launch.kernel.name and "_row" not in one.launch.kernel.name]
    assert products and all(one.has_mma for one in products if capability < 100)
    assert capability != 120 or all(one.shared_bytes <= 99 * 1024 for one in found)
