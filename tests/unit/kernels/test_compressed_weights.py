"""Weights in bfloat16 are held in 12 bits a number without loss: products have the bits of those of plain weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.cpu.linear import CompiledLinear, Packer
from serve_llm.kernels.cpu.moe import _combine

COMPILED = library.find()
ALL = {} if COMPILED is None else {name: Packer(Library(COMPILED, name)) for name in Library(COMPILED).variants}
PACKERS = {name: packer for name, packer in ALL.items() if packer.compresses}
# Outputs, inputs: panels without a neighbour, parts of a panel, parts of a quad, of a tile and of a block.
SHAPES = [(97, 53), (64, 2600), (331, 60), (84, 19), (7, 1), (1, 7), (48, 1034)]
ROWS = [1, 2, 3, 8, 9, 12, 13, 24, 25, 31, 40, 253, 300]

pytestmark = pytest.mark.skipif(not PACKERS, reason="no compiled kernels for AVX-512 here")


@pytest.fixture(params=PACKERS)
def packer(request: pytest.FixtureRequest) -> Packer:
    return PACKERS[request.param]


def make_weight(outputs: int, inputs: int) -> Tensor:
    """Numbers of any size, and some that no code stands for, also the first and the last."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).bfloat16()
    weight.view(-1)[:: outputs * inputs // 23 + 1] = 1e-30
    weight[0, 0] = -2e-38
    weight[outputs // 2, inputs // 2] = 0
    weight[-1, -1] = 3e38
    return weight


def pack(packer: Packer, weight: Tensor) -> CompiledLinear:
    layer = packer.pack(weight)
    assert isinstance(layer, CompiledLinear)
    return layer


def test_which_variants_compress() -> None:
    assert set(PACKERS) == {"avx512", "avx512_bf16"} & set(ALL)


def pack_plain(packer: Packer, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> CompiledLinear:
    with monkeypatch.context() as patch:
        patch.setattr(Packer, "compress", lambda *_: None)
        layer = pack(packer, weight)
    assert not layer.product.upper_bytes
    return layer


@pytest.mark.parametrize("shape", SHAPES)
def test_products_have_the_same_bits(packer: Packer, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = pack_plain(packer, make_weight(*shape), monkeypatch)
    compressed = pack(packer, make_weight(*shape))
    assert compressed.product.upper_bytes
    x = torch.randn(max(ROWS), shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    for rows in ROWS:
        assert torch.equal(compressed(x[:rows]), plain(x[:rows])), f"{rows} rows"


@pytest.mark.parametrize("shape", SHAPES)
def test_no_number_is_changed(packer: Packer, shape: tuple[int, int]) -> None:
    weight = make_weight(*shape)
    layer = pack(packer, weight)
    identity = torch.eye(shape[1]).bfloat16()
    for one in identity.split(5):
        found = layer(one)
        assert torch.equal(found, (one.float() @ weight.float().T).bfloat16())


def test_what_is_not_finite_is_kept(packer: Packer) -> None:
    weight = make_weight(40, 64)
    weight[3, 5], weight[4, 6], weight[20, 63] = torch.nan, torch.inf, -torch.inf
    found = pack(packer, weight)(torch.ones(3, 64).bfloat16())
    assert found[:, 3].isnan().all() and (found[:, 4] == torch.inf).all() and (found[:, 20] == -torch.inf).all()
    assert found.isfinite().sum() == 3 * 37


def test_weights_that_need_many_codes_stay_plain(packer: Packer) -> None:
    bits = torch.randint(-(1 << 15), 1 << 15, (64, 512), generator=torch.Generator().manual_seed(0))
    weight = bits.to(torch.int16).view(torch.bfloat16).nan_to_num()
    weight[weight.abs() < 2e-38] = 0  # products flush subnormal numbers
    layer = pack(packer, weight)
    assert not layer.product.upper_bytes
    x = torch.eye(512).bfloat16()
    assert torch.equal(layer(x), weight.T)


def test_a_compressed_weight_takes_12_bits_a_number(packer: Packer) -> None:
    layer = pack(packer, torch.randn(512, 1024).bfloat16())
    assert sum(tensor.nbytes for tensor in layer._tensors) < 0.77 * 512 * 1024 * 2


def test_experts_are_alike_whatever_their_numbers(packer: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = [pack(packer, weight) for weight in (torch.randn(64, 96).bfloat16(), make_weight(64, 96))]
    together = _combine(experts)
    assert together is not None
    x = torch.randn(7, 96).bfloat16()
    assert torch.equal(together(x, torch.tensor([0, 3, 7])), torch.cat((experts[0](x[:3]), experts[1](x[3:]))))
    assert _combine([experts[0], pack_plain(packer, make_weight(64, 96), monkeypatch)]) is None
