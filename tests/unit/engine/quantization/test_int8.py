"""Weights rounded to int8: the scheme's definition, and weights that are odd."""

from __future__ import annotations

import pytest
import torch

from serve_llm.engine.quantization.int8 import CHUNK, quantise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (97, 53), (CHUNK, 5), (2 * CHUNK + 3, 8)])
def test_each_weight_is_within_half_a_step(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    numbers, scale = quantise(weight)
    assert (numbers.dtype, scale.dtype, tuple(scale.shape)) == (torch.int8, torch.float32, (shape[0], 1))
    assert (numbers.float().abs().amax(1) == 127).all()
    assert ((numbers * scale - weight.float()).abs() <= 0.5001 * scale).all()


def test_weights_that_int8_holds_stay_what_they_are() -> None:
    numbers = torch.randint(-127, 128, (40, 30), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    numbers[:, 0] = 127
    scale = torch.rand(40, 1, generator=torch.Generator().manual_seed(2)) + 0.1
    again, found = quantise(numbers * scale)
    assert torch.equal(again, numbers)
    torch.testing.assert_close(found, scale)


def test_zeros_nothing_and_what_is_not_finite() -> None:
    weight = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0]])
    numbers, scale = quantise(weight)
    assert numbers[0].tolist() == [0, 0] and scale[0] == 0
    assert not scale[1:].isfinite().any()
    for shape in ((5, 0), (0, 5)):
        numbers, scale = quantise(torch.empty(shape))
        assert (tuple(numbers.shape), tuple(scale.shape)) == (shape, (shape[0], 1))
