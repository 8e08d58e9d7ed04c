"""Stored fp8 weights: torch's product where it exists for the form of their scales; otherwise inputs stay as they
are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reference.scaled_mm import scaled_mm
from serve_llm.kernels import linear_fp8, linear_fp8_blocks, linear_fp8_stored
from serve_llm.kernels.linear import TorchLinear
from serve_llm.kernels.linear_fp8_stored import pack_stored_fp8
from serve_llm.kernels.linear_grouped import GroupQuantWeight, merge_rows, pack_grouped
from support.grouped import make_weight

CPU = torch.device("cpu")
CACHES = (linear_fp8.is_supported, linear_fp8_blocks.is_supported, linear_fp8_stored._log_once)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    for cached in CACHES:
        cached.cache_clear()
    yield
    for cached in CACHES:
        cached.cache_clear()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make(outputs: int = 40, inputs: int = 300, group_size: int = 300, **changes: object) -> GroupQuantWeight:
    return replace(make_weight("fp8", outputs, inputs, group_size), rounds_inputs=True, **changes)


def close(weight: GroupQuantWeight, bias: Tensor | None = None, rows: int = 9, most: float = 0.06) -> float:
    """Return the error of the layer's results, of which rounding the inputs takes 2 to 4 %."""
    x = random(rows, weight.shape[1], seed=3)
    exact = x.float() @ weight.dequantise().T + (0 if bias is None else bias.float())
    found = pack_stored_fp8(weight, bias, torch.bfloat16)(x)
    assert found.shape == exact.shape and found.dtype == torch.bfloat16
    error = float((found.float() - exact).norm() / exact.norm())
    assert error < most
    return error


needs_rows = pytest.mark.skipif(not linear_fp8.is_supported(CPU), reason="this torch has no product of 8-bit floats")


@needs_rows
def test_a_scale_per_row(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    with caplog.at_level(logging.INFO):
        assert close(make()) > 0.01
        assert close(make(), bias=random(40)) > 0.01
        for outputs in (40, 48):
            scale = torch.tensor([0.003]).expand(outputs, 1)  # as of a whole tensor
            assert close(make(outputs, scales=scale), rows=1) > 0.01
    assert [record.getMessage() for record in caplog.records] == [
        "fp8 weights with a scale per row are multiplied by inputs that are rounded to 8 bits"
    ]


@needs_rows
def test_a_static_scale_of_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    weight = make(input_scale=torch.tensor(0.02))
    assert close(weight) > 0.01 < close(weight, rows=1)
    layer = pack_stored_fp8(weight, None, torch.bfloat16)
    x = torch.zeros(3, 300).bfloat16()
    x[:, 0] = torch.tensor([448 * 0.02, 9000.0, torch.inf])
    y = layer(x)
    assert torch.equal(y[0], y[1]) and y[0].isfinite().all(), "limited"
    assert y[2].isnan().all()


@needs_rows
def test_merged_weights_take_the_largest_static_scale() -> None:
    parts = [make(seed, input_scale=torch.tensor(scale)) for seed, scale in ((8, 0.02), (12, 0.05))]
    assert parts[0].is_like(parts[1])
    merged = merge_rows(parts)
    assert merged.rounds_inputs and float(merged.input_scale or 0) == pytest.approx(0.05)
    assert merge_rows([parts[0], replace(parts[1], input_scale=None)]).input_scale is None


def test_blocks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    square = make(256, 300, 128)
    square = replace(square, scales=square.scales[::128].repeat_interleave(128, 0))
    with caplog.at_level(logging.INFO):
        assert close(square) > 0.01
        assert close(make(40, 300, 128), bias=random(40)) > 0.01
        moved = merge_rows([square.map_rows(lambda rows: rows[:70]), square.map_rows(lambda rows: rows[100:220])])
        assert close(moved) > 0.01, "a rank's outputs begin inside a block"
        assert close(square.narrow_columns(128, 150)) > 0.01, "a rank's inputs are blocks"
    assert [record.getMessage() for record in caplog.records] == [
        "fp8 weights with a scale per 128 x 128 block are multiplied by inputs that are rounded to 8 bits",
        "fp8 weights with a scale per 128 inputs are multiplied by inputs that are rounded to 8 bits",
    ]


@pytest.mark.parametrize(
    ("weight", "dtype", "reason"),
    [
        (make(40, 300, 128), torch.bfloat16, "this GPU and this build of torch do not multiply them"),
        (make(40, 300, 64), torch.bfloat16, "blocks cover 64 inputs, not 128"),
        (make(40, 300, 128).narrow_columns(64, 200), torch.bfloat16, "a rank's inputs begin inside a block"),
        (make(), torch.float16, "they are float16, not bfloat16"),
    ],
)
def test_otherwise_inputs_are_not_rounded(
    weight: GroupQuantWeight, dtype: torch.dtype, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    x = random(9, weight.shape[1]).to(dtype)
    with caplog.at_level(logging.INFO):
        found = [pack_stored_fp8(weight, None, dtype)(x) for _ in range(2)]
    assert torch.equal(found[0], pack_grouped(weight, None, dtype)(x)) and torch.equal(*found)
    assert len(caplog.records) == 1 and caplog.records[0].getMessage().endswith(f"to 8 bits: {reason}")


def test_without_numbers() -> None:
    weight = make(8, 128, 128).narrow_columns(0, 0)
    assert isinstance(pack_stored_fp8(weight, None, torch.bfloat16), TorchLinear)
