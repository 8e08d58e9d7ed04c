"""Experts of all rows in one call compute the same bits as one expert after another, in every variant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from serve_llm.kernels import activation, moe
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.linear import Packer
from serve_llm.kernels.cpu.linear_grouped import GroupQuantPacker
from serve_llm.kernels.cpu.moe import ExpertPacker
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.linear_grouped import GroupQuantWeight
from support.experts import Case, make_case

PATH = library.find()
VARIANTS = library.Library(PATH).variants if PATH is not None else ()
pytestmark = pytest.mark.skipif(PATH is None, reason="there are no compiled kernels")
EXPERTS = 7
WIDTH = 96
INNER = 32
GROUP = 16


@pytest.fixture(params=VARIANTS)
def found(request: pytest.FixtureRequest) -> library.Library:
    assert PATH is not None
    return library.Library(PATH, request.param)


def pack_int8(packer: Packer, weight: Tensor, bias: Tensor | None) -> Linear:
    scale = weight.abs().amax(1, keepdim=True).float() / 127
    return packer.pack_int8((weight / scale).round().to(torch.int8), scale, bias)


def pack_int4(packer: GroupQuantPacker, weight: Tensor, bias: Tensor | None, order: Tensor | None = None) -> Linear:
    scales = weight.float().unflatten(1, (-1, GROUP)).abs().amax(2) / 7
    codes = (weight.float() / scales.repeat_interleave(GROUP, 1)).round().add(8).to(torch.uint8)
    return packer.pack(GroupQuantWeight(codes, 4, scales, GROUP, order=order), bias)


def pack_table(packer: GroupQuantPacker, weight: Tensor, bias: Tensor | None) -> Linear:
    scales = weight.float().unflatten(1, (-1, GROUP)).abs().amax(2) / 8
    codes = torch.arange(weight.numel()).view(weight.shape).remainder(16).to(torch.uint8)
    return packer.pack(GroupQuantWeight(codes, 4, scales, GROUP, table=torch.arange(-8.0, 8.0)), bias)


def find_pack(found: library.Library, kind: str) -> Callable[[Tensor, Tensor | None], Linear]:
    if kind == "int4":
        grouped = GroupQuantPacker(found)
        return lambda weight, bias: pack_int4(grouped, weight, bias)
    if kind == "table":
        grouped = GroupQuantPacker(found)
        return lambda weight, bias: pack_table(grouped, weight, bias)
    packer = Packer(found)
    if kind == "int8":
        return lambda weight, bias: pack_int8(packer, weight, bias)
    return packer.pack


def pack_both(
    found: library.Library, case: Case, own: range, pack: Callable[..., Linear]
) -> tuple[moe.PackedExperts, moe.PackedExperts]:
    """In one call, and one by one."""
    first, last = case.biases or (EXPERTS * [None], EXPERTS * [None])
    pairs = [(pack(case.first[n], first[n]), pack(case.last[n], last[n])) for n in own]
    arguments = (pairs, activation.silu_and_mul, own)
    return ExpertPacker(found).pack_experts(*arguments), moe.pack_experts(*arguments)


@pytest.mark.parametrize("own", [range(EXPERTS), range(2, 5), range(3, 3), range(6, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_order_of_the_definitions(found: library.Library, dtype: torch.dtype, own: range) -> None:
    packer = ExpertPacker(found)
    case = make_case(37, EXPERTS, 3, WIDTH, INNER, dtype)
    rows = torch.randn(37, 3, 101).to(dtype)
    rows[3, 1, 5] = torch.inf
    rows[3, 2, 5] = -torch.inf
    assert torch.equal(
        packer.weighted_sum(rows, case.weights).nan_to_num(7.0), moe.weighted_sum(rows, case.weights).nan_to_num(7.0)
    )
    turned = case.weights.t().contiguous().t()
    assert torch.equal(packer.weighted_sum(rows.nan_to_num(), turned), moe.weighted_sum(rows.nan_to_num(), turned))
    order, tokens, bounds = packer.sort_by_expert(case.experts, own)
    expected = moe.sort_by_expert(case.experts, own)
    assert torch.equal(order, expected[0]) and torch.equal(tokens, order // 3) and torch.equal(bounds, expected[1])


@pytest.mark.parametrize("own", [range(EXPERTS), range(2, 5), range(6, 7)])
@pytest.mark.parametrize("tokens", [0, 1, 9, 300])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4", "table"])
def test_bits_of_one_expert_after_another(found: library.Library, kind: str, tokens: int, own: range) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    case = make_case(tokens, EXPERTS, 3, WIDTH, INNER, dtype, bias=True)
    in_one_call, one_by_one = pack_both(found, case, own, find_pack(found, kind))
    assert type(in_one_call) is not type(one_by_one)
    rows = in_one_call(case.x, case.weights, case.experts)
    assert rows.dtype == dtype and rows.is_contiguous()
    assert torch.equal(rows, one_by_one(case.x, case.weights, case.experts))


def test_all_rows_for_one_expert(found: library.Library) -> None:
    """There are more than the inner loops take at once."""
    case = make_case(900, EXPERTS, 1, WIDTH, INNER, torch.float32)
    case.experts.fill_(4)
    in_one_call, one_by_one = pack_both(found, case, range(EXPERTS), find_pack(found, "float32"))
    assert torch.equal(in_one_call(case.x, case.weights, case.experts), one_by_one(case.x, case.weights, case.experts))


def test_a_row_with_nan_leaves_other_rows_as_they_are(found: library.Library) -> None:
    case = make_case(9, EXPERTS, 2, WIDTH, INNER, torch.float32)
    in_one_call, _ = pack_both(found, case, range(EXPERTS), find_pack(found, "float32"))
    whole = in_one_call(case.x, case.weights, case.experts)
    case.x[4] = torch.nan
    broken = in_one_call(case.x, case.weights, case.experts)
    assert broken[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(broken[others], whole[others])


def test_overwritten_weights_are_used(found: library.Library) -> None:
    """As when experts move between ranks."""
    case = make_case(9, EXPERTS, 3, WIDTH, INNER, torch.bfloat16)
    experts, _ = pack_both(found, case, range(EXPERTS), find_pack(found, "int8"))
    held = experts.list_local_experts()
    for to, source in zip(held[0].tensors, held[3].tensors, strict=True):
        to.copy_(source)
    case.experts[:] = torch.tensor([0, 1, 2])
    as_first = experts(case.x, case.weights, case.experts)
    case.experts[:, 0] = 3
    assert torch.equal(as_first, experts(case.x, case.weights, case.experts))


@pytest.mark.parametrize("kind", ["layers of two forms", "reordered inputs", "layers that are not compiled"])
def test_other_layers_are_multiplied_one_by_one(found: library.Library, kind: str) -> None:
    case = make_case(9, 2, 2, WIDTH, INNER, torch.bfloat16, bias=True)
    biases = case.biases
    assert biases is not None
    pack = find_pack(found, "int4")
    grouped = GroupQuantPacker(found)
    order = torch.arange(WIDTH).flip(0)
    firsts: dict[str, list[Linear]] = {
        "layers of two forms": [pack(case.first[0], None), pack(case.first[1], biases[0][1])],
        "reordered inputs": [pack_int4(grouped, weight, None, order) for weight in case.first],
        "layers that are not compiled": [lambda x, weight=weight: x @ weight.T for weight in case.first],
    }
    pairs = [(first, pack(last, None)) for first, last in zip(firsts[kind], case.last, strict=True)]
    packed = ExpertPacker(found).pack_experts(pairs, activation.silu_and_mul, range(2))
    expected = moe.pack_experts(pairs, activation.silu_and_mul, range(2))
    assert type(packed) is type(expected)
    assert torch.equal(packed(case.x, case.weights, case.experts), expected(case.x, case.weights, case.experts))
