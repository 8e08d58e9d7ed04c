"""Weights stored as 8-bit floats with a scale per block of a matrix (DeepSeek-V3 Technical Report, arXiv:2412.19437,
section 3.3.2). Blocks at the lower and right edges may be smaller.
"""

from __future__ import annotations

import torch
from torch import Tensor

from serve_llm.engine.quantization.packed_integers import QuantizedMatrix

DTYPE = torch.float8_e4m3fn


def build_matrix(numbers: Tensor, scales: Tensor, block: tuple[int, int], first: tuple[int, int]) -> QuantizedMatrix:
    """A part of a matrix whose rows have the scales of their blocks.

    numbers: (rows, columns) float8_e4m3fn. scales: floats, one per block that the part overlaps. block: rows and
    columns of a block. first: row and column of the part's first number in its block.
    """
    rows, columns = (torch.arange(size, device=numbers.device) for size in numbers.shape)
    scales_of_rows = scales.float()[(rows + first[0]) // block[0]]
    return QuantizedMatrix(numbers.view(torch.uint8), 8, scales_of_rows, (columns + first[1]) // block[1], block[1])
