"""Experts one by one against the reference, with anything else in the batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from reference import activation as reference_activation
from reference import linear as reference_linear
from reference import moe as reference
from serve_llm.kernels import activation, linear, moe, registry
from support.experts import Case, make_case

CPU = torch.device("cpu")


@pytest.mark.parametrize("own", [range(7), range(2, 5), range(3, 3), range(6, 7)])
@pytest.mark.parametrize("chosen", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_the_reference(dtype: torch.dtype, chosen: int, own: range) -> None:
    case = make_case(23, 7, chosen, 40, 19, dtype)
    expected = reference.pack_experts(case.pairs(own, reference_linear.pack), reference_activation.silu_and_mul, own)(
        case.x, case.weights, case.experts
    )
    for pack in (linear.pack, registry.choose(CPU, dtype, {64}).pack):
        packed = moe.pack_experts(case.pairs(own, pack), activation.silu_and_mul, own)
        found = packed(case.x, case.weights, case.experts)
        assert found.dtype == dtype and found.is_contiguous()
        case.check(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_bits_are_its_own(dtype: torch.dtype) -> None:
    case = make_case(150, 5, 3, 33, 21, dtype)
    pack = registry.choose(CPU, dtype, {64}).pack
    experts = moe.pack_experts(case.pairs(range(5), pack), activation.silu_and_mul, range(5))
    whole = experts(case.x, case.weights, case.experts)
    some = partial(_some, case, experts)
    for rows in (slice(0, 1), slice(1, 150), slice(149, 150), slice(40, 57), slice(0, 150, 7)):
        assert torch.equal(some(rows), whole[rows])


def _some(case: Case, experts: moe.Experts, rows: slice) -> Tensor:
    return experts(case.x[rows], case.weights[rows], case.experts[rows])


def test_a_broken_row_breaks_itself_only() -> None:
    case = make_case(9, 4, 2, 33, 21, torch.float32)
    experts = moe.pack_experts(case.pairs(range(4), linear.pack), activation.silu_and_mul, range(4))
    whole = experts(case.x, case.weights, case.experts)
    case.x[4] = torch.nan
    case.weights[4] = torch.nan
    broken = experts(case.x, case.weights, case.experts)
    assert broken[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(broken[others], whole[others])


def test_no_tokens() -> None:
    case = make_case(0, 4, 2, 33, 21, torch.float32)
    experts = moe.pack_experts(case.pairs(range(4), linear.pack), activation.silu_and_mul, range(4))
    assert experts(case.x, case.weights, case.experts).shape == (0, 33)
