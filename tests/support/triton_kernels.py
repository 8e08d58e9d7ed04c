"""A small kernel for testing the harness of `support.triton`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.triton.product import dot


@triton.jit
def _multiply(left, right, product, SIZE: tl.constexpr):
    cell = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.zeros((SIZE, SIZE), tl.float32)
    tl.store(product + cell, dot(tl.load(left + cell), tl.load(right + cell), total))


def multiply(left: Tensor, right: Tensor, **options: int) -> Tensor:
    """Multiply left and right: (size, size), contiguous, size a power of two from 16 -> left @ right, float32."""
    product = torch.empty(left.shape, device=left.device)
    _multiply[(1,)](left, right, product, left.shape[0], **options)
    return product
