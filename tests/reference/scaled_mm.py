"""torch's product of 8-bit floats with a scale per block, in float32: CPUs have none.

Shapes, strides and types of the arguments are checked by what torch itself says of the product on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from serve_llm.kernels import linear_fp8_blocks

BLOCK = 128
product = functional.scaled_mm


def use_definition(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The body of a fixture: replaces torch's product, whose support is looked up again before and after it."""
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    linear_fp8_blocks.is_supported.cache_clear()
    yield
    linear_fp8_blocks.is_supported.cache_clear()


def scaled_mm(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    left_recipe: ScalingType,
    right_scale: Tensor,
    right_recipe: ScalingType,
    *,
    bias: Tensor | None = None,
    output_dtype: torch.dtype,
    use_fast_accum: bool = False,
) -> Tensor:
    """Same contract as `torch.nn.functional.scaled_mm` for two kinds of blocks; others go to torch."""
    described = [None if one is None else _without_data(one) for one in (left, right, left_scale, right_scale, bias)]
    how = {"output_dtype": output_dtype, "use_fast_accum": use_fast_accum}
    product(*described[:3], left_recipe, described[3], right_recipe, bias=described[4], **how)  # type: ignore[arg-type]
    if left_recipe == ScalingType.RowWise:
        return product(left, right, left_scale, left_recipe, right_scale, right_recipe, bias=bias, **how)  # type: ignore[arg-type]
    assert left_recipe == ScalingType.BlockWise1x128 and not use_fast_accum, "the GPU's library refuses the latter"
    assert len(left) % 4 == 0, "scales of a block are to begin at multiples of 16 bytes"
    scales = right_scale
    if right_recipe == ScalingType.BlockWise128x128:
        scales = right_scale[: len(right) // BLOCK].t().repeat_interleave(BLOCK, 0)
    whole = left.float() * left_scale.repeat_interleave(BLOCK, 1)
    return (whole @ (right.t().float() * scales.repeat_interleave(BLOCK, 1)).t()).to(output_dtype)


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
