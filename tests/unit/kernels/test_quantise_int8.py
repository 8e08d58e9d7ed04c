"""Rounding weights to int8: the scheme's definition, and unusual weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.rows import RowKernels
from serve_llm.kernels.quantise_int8 import CHUNK, quantise_int8

PATH = library.find()
VARIANTS = library.Library(PATH).variants if PATH is not None else ()
Quantise = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(params=["torch", *VARIANTS])
def quantise(request: pytest.FixtureRequest) -> Quantise:
    """Quantise by the definition or a compiled version."""
    if request.param == "torch":
        return quantise_int8
    assert PATH is not None
    return RowKernels(library.Library(PATH, request.param)).quantise_int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (97, 53), (CHUNK, 5), (2 * CHUNK + 3, 8)])
def test_each_weight_is_within_half_a_step(quantise: Quantise, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    numbers, scale = quantise(weight)
    assert (numbers.dtype, scale.dtype, tuple(scale.shape)) == (torch.int8, torch.float32, (shape[0], 1))
    assert (numbers.float().abs().amax(1) == 127).all()
    assert ((numbers * scale - weight.float()).abs() <= 0.5001 * scale).all()


def test_weights_that_int8_holds_stay_what_they_are(quantise: Quantise) -> None:
    numbers = torch.randint(-127, 128, (40, 30), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    numbers[:, 0] = 127
    scale = torch.rand(40, 1, generator=torch.Generator().manual_seed(2)) + 0.1
    again, found = quantise(numbers * scale)
    assert torch.equal(again, numbers)
    torch.testing.assert_close(found, scale)


def test_zeros_nothing_and_what_is_not_finite(quantise: Quantise) -> None:
    weight = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0]])
    numbers, scale = quantise(weight)
    assert numbers[0].tolist() == [0, 0] and scale[0] == 0
    assert not scale[1:].isfinite().any()
    for shape in ((5, 0), (0, 5)):
        numbers, scale = quantise(torch.empty(shape))
        assert (tuple(numbers.shape), tuple(scale.shape)) == (shape, (shape[0], 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_compiled_versions_give_the_bits_of_the_definition(quantise: Quantise, dtype: torch.dtype) -> None:
    weight = torch.randn((70, 131), generator=torch.Generator().manual_seed(3)).to(dtype)
    weight[2] *= 1e-6
    weight[3] = 0
    for part in (weight, weight[:, 40:], weight.T, weight[5:9]):
        assert all(torch.equal(a, b) for a, b in zip(quantise(part), quantise_int8(part), strict=True))
