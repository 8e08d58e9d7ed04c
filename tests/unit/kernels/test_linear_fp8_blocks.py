"""Products in fp8 with a scale per block. CPUs have none, so torch's product is replaced by a definition, after torch
has checked the shapes and strides that a GPU would get."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reference.scaled_mm import scaled_mm, use_definition
from serve_llm.kernels import linear_fp8_blocks
from serve_llm.kernels.linear_fp8 import DTYPE
from serve_llm.kernels.linear_fp8_blocks import BLOCK, pack_fp8_blocks, quantise_blocks

CPU = torch.device("cpu")
SHAPES = [(128, 256), (2112, 384), (130, 129), (7, 640), (256, 128), (1, 1)]  # outputs, inputs


@pytest.fixture(autouse=True)
def product(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from use_definition(monkeypatch)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make_weight(outputs: int, inputs: int, is_square: bool) -> tuple[Tensor, Tensor]:
    """Return numbers, and scales per output, which differ by far."""
    numbers = (random(outputs, inputs).float() * 100).clamp(-448, 448).to(DTYPE)
    generator = torch.Generator().manual_seed(1)
    scales = torch.rand((outputs, -(-inputs // BLOCK)), generator=generator).mul_(8).exp2_() / 1000
    return numbers, scales[::BLOCK].repeat_interleave(BLOCK, 0)[:outputs] if is_square else scales


def test_blocks_are_rounded_to_the_nearest_number() -> None:
    x = random(5, 300).float() * torch.logspace(-4, 4, 5)[:, None]
    x[2, :BLOCK] = 0.0
    numbers, scales = quantise_blocks(x, 384)
    assert numbers.shape == (8, 384) and scales.shape == (8, 3) and scales.stride() == (1, 8)
    restored = numbers.float() * scales.repeat_interleave(BLOCK, 1)
    assert not restored[5:].any() and not restored[:, 300:].any() and not restored[2, :BLOCK].any()
    largest = restored.view(8, 3, BLOCK).abs().amax(2).repeat_interleave(BLOCK, 1)
    error = (restored[:5, :300] - x).abs() / largest[:5, :300].clamp(min=1e-30)
    assert error.max() <= 1.001 * 16 / 448, "half of a step of the largest numbers"
    for broken in (torch.nan, torch.inf):
        x[1, 290] = broken
        numbers, scales = quantise_blocks(x, 384)
        assert (numbers.float() * scales.repeat_interleave(BLOCK, 1)).isnan().any(1).tolist() == [False, True] + [
            False
        ] * 6


@pytest.mark.parametrize("is_square", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_product(shape: tuple[int, int], is_square: bool) -> None:
    numbers, scales = make_weight(*shape, is_square)
    exact = numbers.double() * scales.double().repeat_interleave(BLOCK, 1)[:, : shape[1]]
    for rows, bias in ((1, None), (3, random(shape[0], seed=2)), (17, None)):
        x = random(rows, shape[1] + 5, seed=1)[:, : shape[1]]  # rows with gaps
        y = pack_fp8_blocks(numbers, scales, bias)(x)
        assert y.dtype == torch.bfloat16 and y.shape == (rows, shape[0])
        rounded, own = quantise_blocks(x, -(-shape[1] // BLOCK) * BLOCK)
        restored = (rounded.double() * own.double().repeat_interleave(BLOCK, 1))[:rows, : shape[1]]
        wanted = restored @ exact.T + (0 if bias is None else bias.double())
        size = (restored.abs() @ exact.abs().T).amax(1, keepdim=True)
        assert ((y.double() - wanted).abs() / size).max() < 2.0**-7


@pytest.mark.parametrize("is_square", [True, False])
def test_what_a_layer_holds(is_square: bool) -> None:
    layer = pack_fp8_blocks(*make_weight(2112, 640, is_square))
    assert layer.scale.numel() == (17 * 8 if is_square else 2112 * 5)  # type: ignore[attr-defined]
    assert layer.weight.numel() == (2176 if is_square else 2112) * 640  # type: ignore[attr-defined]


def test_without_numbers() -> None:
    bias = random(97)
    none, scale = torch.empty((97, 0), dtype=DTYPE), torch.empty(97, 0)
    assert torch.equal(pack_fp8_blocks(none, scale, bias)(random(2, 0)), bias.expand(2, 97))
    numbers, scales = make_weight(97, 256, True)
    assert pack_fp8_blocks(numbers[:0], scales[:0])(random(2, 256)).shape == (2, 0)
    assert pack_fp8_blocks(numbers, scales)(random(0, 256)).shape == (0, 97)


@pytest.mark.parametrize("is_square", [True, False])
def test_devices_without_it_are_found(is_square: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert linear_fp8_blocks.is_supported(CPU, is_square)
    linear_fp8_blocks.is_supported.cache_clear()

    def refuses(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90")

    def is_wrong(*args: object, **kwargs: object) -> Tensor:
        return scaled_mm(*args[:4], args[4].flip(0), *args[5:], **kwargs)  # type: ignore[arg-type, attr-defined]

    for wrong in (refuses, is_wrong):
        monkeypatch.setattr(functional, "scaled_mm", wrong)
        assert not linear_fp8_blocks.is_supported.__wrapped__(CPU, is_square)
