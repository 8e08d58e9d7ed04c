"""A packed matrix that is used both as a linear layer and for row look-ups: an LM head and the embedding tied to it, or
either of them alone.

The versions here are the definition: they hold the matrix once for each use. `kernels.cpu` holds it once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.kernels import linear, linear_int8
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.linear_grouped import GroupQuantWeight

LookUp = Callable[[Tensor], Tensor]  # (rows,) int64 -> (rows, inputs)


class EmbeddingTable(NamedTuple):
    """A packed matrix (rows, inputs), as a linear layer and as a table."""

    multiply: Linear
    look_up: LookUp  # in the model's dtype; zeros for any ids if the matrix has no rows


def pack_int8_table(weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> EmbeddingTable:
    """weight, scale, bias: see `kernels.linear_int8.pack_int8`. dtype: of looked-up rows, which are weight * scale."""

    def look_up(ids: Tensor) -> Tensor:
        return (weight[ids] * scale[ids]).to(dtype)

    packed = linear_int8.pack_int8(weight, scale, bias)
    return EmbeddingTable(packed, look_up if len(weight) else zeros(weight.shape[1], dtype))


def pack_grouped_table(weight: GroupQuantWeight, bias: Tensor | None, dtype: torch.dtype) -> EmbeddingTable:
    """weight, bias: see `kernels.linear_grouped.pack_grouped`. dtype: of looked-up rows, and of the product."""
    dense = weight.dequantise().to(dtype)
    look_up = (lambda ids: functional.embedding(ids, dense)) if len(dense) else zeros(dense.shape[1], dtype)
    return EmbeddingTable(linear.pack(dense, bias), look_up)


def zeros(inputs: int, dtype: torch.dtype) -> LookUp:
    """Return zeros, for a matrix without rows."""
    return lambda ids: torch.zeros((len(ids), inputs), dtype=dtype, device=ids.device)
