"""Stored fp8 weights with Triton's rounding of their inputs, interpreted: the same bits as with the definition's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from reference.scaled_mm import use_definition
from serve_llm.kernels import linear_fp8, linear_fp8_stored, registry
from support.grouped import make_weight
from support.triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    not linear_fp8.is_supported(CPU), reason="this torch has no product of 8-bit floats on a CPU"
)


@pytest.fixture(autouse=True)
def product(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from use_definition(monkeypatch)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize(
    ("outputs", "group_size", "input_scale"),
    [(40, 300, None), (40, 300, torch.tensor(0.02)), (40, 128, None), (1, 128, None)],
)
def test_the_same_bits(outputs: int, group_size: int, input_scale: Tensor | None) -> None:
    weight = replace(make_weight("fp8", outputs, 300, group_size), rounds_inputs=True, input_scale=input_scale)
    kernels = registry.with_triton(batch_invariant=False)
    assert isinstance(kernels, registry.Kernels) and kernels.pack_stored_fp8 is not None
    bias = random(outputs)
    ours = kernels.pack_stored_fp8(weight, bias, torch.bfloat16)
    theirs = linear_fp8_stored.pack_stored_fp8(weight, bias, torch.bfloat16)
    assert type(ours) is type(theirs)
    for rows in (0, 1, 3, 9):
        for x in (random(rows, 300), random(rows, 310)[:, 5:305]):
            assert torch.equal(ours(x), theirs(x))
