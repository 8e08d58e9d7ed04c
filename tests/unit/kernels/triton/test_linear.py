"""The batch-invariant linear layer: equal to the definition, and rows do not depend on other rows."""

from __future__ import annotations

import pytest
import torch

from support.triton import NO_TRITON, assert_fits, compile_for, record

pytest.importorskip("triton", reason=NO_TRITON)
from reference import linear as definition
from serve_llm.kernels.triton import linear


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 16), (5, 37, 50), (67, 130, 129), (3, 1, 1), (2, 8, 0)]
)
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_the_definition(rows: int, inputs: int, outputs: int, with_bias: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, inputs, dtype=dtype, seed=1), random(outputs, inputs, dtype=dtype, seed=2)
    bias = random(outputs, dtype=dtype, seed=3) if with_bias else None
    found = linear.pack(weight, bias)(x)
    expected = definition.pack(weight, bias)(x)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(found, expected, atol=tolerance * inputs**0.5, rtol=tolerance)


def test_weights_beside_stand_behind() -> None:
    x, weight = random(3, 20, dtype=torch.float32, seed=1), random(30, 20, dtype=torch.float32, seed=2)
    parts = weight.split([5, 7, 18])
    assert torch.equal(linear.pack(parts[0], None, parts[1:])(x), linear.pack(weight)(x))


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = random(70, 100, dtype=torch.bfloat16, seed=1), random(40, 100, dtype=torch.bfloat16, seed=2)
    layer = linear.pack(weight)
    whole = layer(x)
    for rows in (slice(0, 1), slice(66, 67), slice(3, 69)):
        assert torch.equal(layer(x[rows]), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_for_each_head(dtype: torch.dtype) -> None:
    """The inputs are part of wider rows, as in latent attention; a row does not depend on the others."""
    wide, weight = random(70, 3, 50, dtype=dtype, seed=1), random(3, 20, 37, dtype=dtype, seed=2)
    x = wide[:, :, 5:42]
    layer = linear.pack_heads(weight)
    found = layer(x)
    expected = definition.pack_heads(weight)(x)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5)
    for rows in (slice(0, 1), slice(66, 67), slice(3, 69)):
        assert torch.equal(layer(x[rows]), found[rows])
    assert layer(x[:0]).shape == (0, 3, 20)


def test_tiles_follow_the_weight_alone() -> None:
    assert [linear.choose_block_width(outputs, 2) for outputs in (8, 1024, 4096, 6144, 28672, 128256)] == [
        16,
        16,
        32,
        32,
        128,
        128,
    ]
    assert linear.choose_block_width(28672, 4) == 64


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_is_compiled_for_tensor_cores(capability: int) -> None:
    def launch(outputs: int, inputs: int, dtype: torch.dtype) -> None:
        x, weight = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((7, inputs), (outputs, inputs)))
        linear.pack(weight, weight[:, 0].contiguous())(x)

    shapes = [(2048, 2048), (4096, 4096), (28672, 4096)]
    half = compile_for(record(lambda: [launch(*shape, torch.bfloat16) for shape in shapes]), capability)
    assert_fits(half)
    assert all(each.has_wgmma if capability == 90 else each.has_mma for each in half)
    assert_fits(compile_for(record(lambda: launch(28672, 4096, torch.float32)), capability), stack_bytes=256)

    def heads(outputs: int, inputs: int) -> None:
        x = torch.empty((7, 128, 576), dtype=torch.bfloat16, device="meta")[:, :, :inputs]
        linear.pack_heads(torch.empty((128, outputs, inputs), dtype=torch.bfloat16, device="meta"))(x)

    latent = compile_for(record(lambda: [heads(512, 128), heads(128, 512)]), capability)
    assert_fits(latent)
    assert all(each.has_wgmma if capability == 90 else each.has_mma for each in latent)
