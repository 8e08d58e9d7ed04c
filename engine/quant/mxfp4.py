"""MXFP4 weights to plain numbers (OCP Microscaling Formats specification 1.0, sections 5.3 and 6.3).

Blocks of 32 numbers of 4 bits, a sign, two bits of exponent and one of mantissa, share a power of two as their scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # numbers
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1, by their lower three bits; the fourth is the sign
BIAS = 127  # of a scale's exponent
NAN = 255  # a scale that stands for no number


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks: (rows, blocks, 16) uint8, two numbers a byte, the first in its lower half. scales: (rows, blocks) uint8.

    Returns (rows, 32 * blocks) float32. Exact: bfloat16 has room for every such number as well.
    """
    values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], device=blocks.device)
    halves = torch.stack((blocks & 0xF, blocks >> 4), -1).flatten(-2)  # (rows, blocks, 32)
    exponents = scales.float().sub_(BIAS).masked_fill_(scales == NAN, torch.nan)
    return (values[halves.int()] * torch.exp2(exponents).unsqueeze(-1)).flatten(-2)
