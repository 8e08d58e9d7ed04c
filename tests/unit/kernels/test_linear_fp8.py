"""Products in fp8: rows and weights are rounded to the nearest value, and torch's product of them, which CPUs support
too, equals the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reference import linear_fp8 as definition
from serve_llm.engine.quantization.fp8 import quantise
from serve_llm.kernels import linear_fp8

CPU = torch.device("cpu")
SHAPES = [(96, 64), (97, 53), (130, 33), (7, 1), (1, 7), (320, 1024)]  # outputs, inputs
needs_product = pytest.mark.skipif(not linear_fp8.is_supported(CPU), reason="this torch has no product of 8-bit floats")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class TestQuantiseRows:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_to_the_nearest_number(self, dtype: torch.dtype) -> None:
        x = (random(9, 53) * torch.logspace(-4, 4, 9)[:, None]).to(dtype)
        numbers, scales = linear_fp8.quantise_rows(x, 64)
        assert numbers.shape == (9, 64) and scales.shape == (9, 1) and scales.dtype == torch.float32
        assert not numbers[:, 53:].float().any()
        assert (numbers.float().abs().amax(1) == 448.0).all()
        there_are = torch.arange(256, dtype=torch.uint8).view(linear_fp8.DTYPE).double().nan_to_num()
        wanted = x.double() / scales.double()
        nearest = (wanted.unsqueeze(-1) - there_are).abs().amin(-1)
        assert ((numbers[:, :53].double() - wanted).abs() - nearest).max() < 1e-4  # ties aside, which float32 moves

    def test_zeros_and_what_is_not_finite(self) -> None:
        x = random(4, 16).float()
        x[0], x[1, 3], x[2, 5], x[3] = 0.0, torch.nan, -torch.inf, 1e-38
        numbers, scales = linear_fp8.quantise_rows(x, 16)
        restored = numbers.float() * scales
        assert not restored[0].any() and not restored[3].any()
        assert restored[1].isnan().any() and restored[2].isnan().any()


@needs_product
class TestProduct:
    @pytest.mark.parametrize("rows", [1, 3, 17])
    @pytest.mark.parametrize("with_bias", [False, True])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_equals_the_definition(self, shape: tuple[int, int], with_bias: bool, rows: int) -> None:
        weight, scale = quantise(random(*shape))
        bias = random(shape[0], seed=2) if with_bias else None
        x = (random(rows, shape[1], seed=1).float() * torch.logspace(-3, 3, rows)[:, None]).bfloat16()
        ours = linear_fp8.pack_fp8(weight, scale, bias)(x)
        exact = definition.pack_fp8(weight, scale, bias)(x)
        assert ours.dtype == torch.bfloat16 and ours.shape == (rows, shape[0])
        size = exact.float().abs().amax(1, keepdim=True)
        assert ((ours.float() - exact.float()).abs() / size).max() < 2.0**-7

    def test_close_to_the_product_of_what_was_rounded(self) -> None:
        """Each factor has an error of at most 2**-4; sums average them: measured 3.7 % of the size of the results."""
        weight, x = random(256, 512), random(20, 512, seed=1)
        ours, exact = linear_fp8.pack_fp8(*quantise(weight))(x).float(), x.float() @ weight.float().T
        assert 0.01 < (ours - exact).norm() / exact.norm() < 0.05

    def test_zeros_and_what_is_not_finite(self) -> None:
        x, bias = random(4, 53), random(97)
        x[1], x[2, 7], x[3, 9] = 0.0, torch.nan, torch.inf
        y = linear_fp8.pack_fp8(*quantise(random(97, 53)), bias)(x)
        assert torch.equal(y[1], bias) and y[0].isfinite().all() and not y[2:].isfinite().any()

    def test_nothing(self) -> None:
        bias = random(97)
        none, scale = quantise(torch.empty(97, 0))
        assert torch.equal(linear_fp8.pack_fp8(none, scale, bias)(random(2, 0)), bias.expand(2, 97))
        assert not linear_fp8.pack_fp8(none, scale)(random(2, 0)).any()
        assert linear_fp8.pack_fp8(*quantise(torch.empty(0, 53)))(random(2, 53)).shape == (2, 0)
        assert linear_fp8.pack_fp8(*quantise(random(97, 53)))(random(0, 53)).shape == (0, 97)


def test_devices_without_it_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **kwargs: object) -> None:
        raise RuntimeError(
            "torch.nn.functional.scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9"
        )

    monkeypatch.setattr(functional, "scaled_mm", refuses)
    assert not linear_fp8.is_supported.__wrapped__(CPU)
    monkeypatch.setattr(functional, "scaled_mm", lambda *args, **kwargs: torch.zeros(16, 16, dtype=torch.bfloat16))
    assert not linear_fp8.is_supported.__wrapped__(CPU)


def test_weights_keep_their_outputs_sizes() -> None:
    weight = random(5, 40).float()
    weight[1], weight[2] = 0.0, weight[2] * 1e6
    numbers, scale = quantise(weight)
    assert numbers.dtype == linear_fp8.DTYPE and scale.shape == (5, 1) and scale[1] == 0.0
    error = (numbers.float() * scale - weight).abs().amax(1) / weight.abs().amax(1)
    assert error.nan_to_num().max() < 2.0**-4
