"""MXFP4 weights (OCP Microscaling Formats specification 1.0, sections 5.3 and 6.3).

Blocks of 32 4-bit numbers (one sign bit, two exponent bits, one mantissa bit) share a power of two as their scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve_llm.kernels.linear_grouped import GroupQuantWeight, build_e2m1_table

BLOCK = 32  # numbers per block


def unpack(packed: Tensor) -> Tensor:
    """(..., bytes) uint8, two codes in each, the first in the lower half -> (..., 2 * bytes) uint8."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def build_weight(blocks: Tensor, scales: Tensor) -> GroupQuantWeight:
    """blocks: (rows, blocks, 16) uint8. scales: (rows, blocks) uint8, exponents of two plus 127, or 255 for NaN."""
    codes = unpack(blocks).flatten(1)
    return GroupQuantWeight(codes, 4, scales.view(torch.float8_e8m0fnu), BLOCK, table=build_e2m1_table(blocks.device))
