"""MXFP4 weights (OCP Microscaling Formats specification 1.0, sections 5.3 and 6.3).

Blocks of 32 4-bit numbers (one sign bit, two exponent bits, one mantissa bit) share a power of two as their scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve_llm.kernels.linear_grouped import GroupedWeight

BLOCK = 32  # numbers per block
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1, by the lower three bits; the fourth is the sign


def build_table(device: torch.device) -> Tensor:
    """The numbers of all codes: (16,) float32."""
    return torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], device=device)


def unpack(packed: Tensor) -> Tensor:
    """(..., bytes) uint8, two codes in each, the first in the lower half -> (..., 2 * bytes) uint8."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def build_weight(blocks: Tensor, scales: Tensor) -> GroupedWeight:
    """blocks: (rows, blocks, 16) uint8. scales: (rows, blocks) uint8, exponents of two plus 127, or 255 for NaN."""
    codes = unpack(blocks).flatten(1)
    return GroupedWeight(codes, 4, scales.view(torch.float8_e8m0fnu), BLOCK, table=build_table(blocks.device))
