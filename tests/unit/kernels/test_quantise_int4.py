"""Rounding weights to 4 bits: every variant against the definition."""

from __future__ import annotations

import pytest
import torch

from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.rows import RowKernels
from serve_llm.kernels.quantise_int4 import quantise_int4

PATH = library.find()
VARIANTS = library.Library(PATH).variants if PATH is not None else ()
pytestmark = pytest.mark.skipif(PATH is None, reason="there are no compiled kernels")


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> RowKernels:
    assert PATH is not None
    return RowKernels(library.Library(PATH, request.param))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "group_size"), [(1, 8, 32), (37, 200, 64), (90, 61, 61), (64, 256, 32)])
def test_against_the_definition(
    kernels: RowKernels, outputs: int, inputs: int, group_size: int, dtype: torch.dtype
) -> None:
    weight = torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(outputs)).to(dtype) * 0.05
    codes, scales, zeros = kernels.quantise_int4(weight, group_size)
    wanted_codes, wanted_scales, wanted_zeros = quantise_int4(weight, group_size)
    # Sums in another order can choose another of two equally good ranges.
    same = (scales - wanted_scales).abs() <= 2e-3 * wanted_scales
    assert same.float().mean() > 0.98
    assert torch.equal(zeros[same], wanted_zeros[same])
    groups = torch.arange(inputs) // group_size
    assert (codes == wanted_codes)[same[:, groups]].float().mean() > 0.995
    errors = [
        ((found - zero[:, groups]) * scale[:, groups] - weight).square().sum()
        for found, scale, zero in ((codes, scales, zeros), (wanted_codes, wanted_scales, wanted_zeros))
    ]
    assert abs(errors[0] / errors[1] - 1) < 1e-3


def test_columns_of_a_larger_matrix_and_no_numbers(kernels: RowKernels) -> None:
    weight = torch.randn((20, 96), generator=torch.Generator().manual_seed(1)).bfloat16()
    for part in (weight[:, 32:], weight[5:9], weight.T):
        found = kernels.quantise_int4(part, 32)
        assert all(torch.equal(a, b) for a, b in zip(found, kernels.quantise_int4(part.contiguous(), 32), strict=True))
    assert kernels.quantise_int4(weight[:0], 32)[0].shape == (0, 96)
    assert kernels.quantise_int4(weight[:, :0], 32)[0].shape == (20, 0)


def test_extreme_groups(kernels: RowKernels) -> None:
    weight = torch.zeros(6, 32)
    weight[1, 3], weight[2, 3], weight[3, 3] = torch.nan, torch.inf, -torch.inf
    weight[4] = 1e9  # exceeds float16
    weight[5, :16] = 1e-7  # below the smallest normal float16
    codes, scales, zeros = kernels.quantise_int4(weight, 32)
    wanted = quantise_int4(weight, 32)
    for row in (0, 4, 5):
        assert torch.equal(scales[row], wanted[1][row])
        assert torch.equal(zeros[row], wanted[2][row])
    assert torch.equal(codes[[0, 5]], wanted[0][[0, 5]])
    assert not scales[1:4].isfinite().any()
