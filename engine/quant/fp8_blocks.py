"""Weights stored as 8-bit floats with a scale for each block of a matrix, to plain numbers (DeepSeek-V3 Technical
Report, arXiv:2412.19437, section 3.3.2).

Blocks at the lower and right edges are cut off where the matrix ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn


def dequantise(numbers: Tensor, scales: Tensor, block: tuple[int, int], first: tuple[int, int]) -> Tensor:
    """A part of a matrix: each number times its block's scale, rounded to float32.

    numbers: (rows, columns) float8_e4m3fn. scales: (blocks, blocks) of floats, of all that the part reaches into.
    block: rows and columns. first: where in its block the part's first number is.

    Returns (rows, columns) float32.
    """
    rows, columns = numbers.shape
    found = numbers.float()
    above, left = first
    for index, of_columns in enumerate(scales.float()):  # block by block: no second matrix of float32
        begin = max(0, index * block[0] - above)
        end = min(rows, (index + 1) * block[0] - above)
        found[begin:end] *= of_columns.repeat_interleave(block[1])[left : left + columns]
    return found
