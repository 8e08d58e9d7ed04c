"""Quantising to 4 bits: values that the format can represent are kept, and errors are those of 4 bits."""

from __future__ import annotations

import pytest
import torch

from serve_llm.engine.quantization.int4 import quantise


def random_matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("group_size", [32, 64, None])
def test_numbers_that_4_bits_hold_are_kept(group_size: int | None) -> None:
    levels = torch.randint(0, 16, (40, 192), generator=torch.Generator().manual_seed(3)).float()
    levels[:, ::32], levels[:, 1::32] = 0, 15
    weight = (levels - 6) * 0.03125
    assert torch.equal(quantise(weight, group_size).dequantise(), weight)


def test_the_error_is_smaller_than_that_of_rounding_to_the_nearest() -> None:
    weight = random_matrix(600, 200)
    packed = quantise(weight, 64)
    assert packed.scales.shape == (600, 4)
    groups = torch.nn.functional.pad(weight, (0, 56)).view(600, 4, 64)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    nearest = ((((groups / scale).round() + zero).clamp(0, 15) - zero) * scale).flatten(1)[:, :200]
    assert (packed.dequantise() - weight).square().mean() < 0.97 * (nearest - weight).square().mean()


def test_zeros_and_what_is_not_a_number() -> None:
    weight = random_matrix(3, 64)
    weight[0] = 0
    weight[1, 40] = torch.nan
    dequantised = quantise(weight, 32).dequantise()
    assert torch.equal(dequantised[0], weight[0])
    assert dequantised[1, 32:].isnan().any() and dequantised[1, :32].isfinite().all()
    assert quantise(random_matrix(0, 64), 32).shape == (0, 64)
    assert quantise(random_matrix(4, 0), 32).shape == (4, 0)
