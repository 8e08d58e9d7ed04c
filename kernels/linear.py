"""Linear layers whose weights are put in the fastest layout once, when they are loaded. Knows tensors only.

Routes, by what was measured on a CPU (rows of input M; bytes of weights read per second, 8192x2048 bf16, M=1):

    oneDNN, packed   CPU, bf16 and float32   77 GB/s   private operators of torch: used where they exist and work
    functional       everywhere else         22 GB/s

Batch invariance on a CPU: a row's bits must not depend on the number of rows. Measured (24 shapes, numbers of rows
from 1 to 2047, 1 to 16 threads): packed, both dtypes, all numbers from 2 up agree, and 1 differs for some shapes;
functional float32 agrees only at multiples of 16. The input is padded with zero rows to such a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

MOST_ROWS = 256  # of one call: there the product is bound by arithmetic, so that weights read again cost nothing


class Linear(Protocol):
    """x: (rows, inputs) -> (rows, outputs), in the weight's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


def pack(weight: Tensor, bias: Tensor | None = None, beside: Sequence[Tensor] = ()) -> Linear:
    """The layer x @ weight.T + bias. weight: (outputs, inputs); bias: (outputs,) or None; both on their final device.

    beside: weights of more outputs of the same input and dtype, whose results stand behind those of `weight`; the bias
    is for all. The caller lets go of weights afterwards: the result may hold a copy in another layout. Outputs or
    inputs may be none at all; without inputs the result is the bias, or zeros.
    """
    weight = torch.cat((weight, *beside)) if beside else weight.contiguous()
    if weight.numel() == 0:
        return Functional(weight, bias, row_multiple=1)
    if weight.device.type != "cpu":
        return Functional(weight, bias, row_multiple=1)
    if _onednn_works(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        return _OneDNN(packed, bias)
    return Functional(weight, bias, row_multiple=16)


def pack_heads(weight: Tensor, *, pack: Callable[[Tensor], Linear] = pack) -> Linear:
    """A product for each head: x (rows, heads, inputs) -> (rows, heads, outputs). weight: (heads, outputs, inputs).
    pack: for one of them, on a CPU; elsewhere it is one product of batched matrices."""
    if weight.device.type == "cpu":
        heads, shape = [pack(one) for one in weight], weight.shape[:2]

        def one_by_one(x: Tensor) -> Tensor:
            y = x.new_empty((x.shape[0], *shape))
            for index, head in enumerate(heads):
                y[:, index] = head(x[:, index])
            return y

        return one_by_one
    turned = weight.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return lambda x: torch.bmm(x.transpose(0, 1), turned).transpose(0, 1)


@dataclass(frozen=True)
class _OneDNN:
    weight: Tensor  # opaque layout
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows <= MOST_ROWS:
            return self._piece(x)
        return torch.cat([self._piece(x[start : start + MOST_ROWS]) for start in range(0, rows, MOST_ROWS)])

    def _piece(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = with_rows(x, few_sizes(rows))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(padded, self.weight, self.bias, "none", [], "")
        return y[:rows]


@dataclass(frozen=True)
class Functional:
    """The weight as it is: (outputs, inputs)."""

    weight: Tensor
    bias: Tensor | None
    row_multiple: int

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        padded = -(-rows // self.row_multiple) * self.row_multiple
        return functional.linear(with_rows(x, padded), self.weight, self.bias)[:rows]


def few_sizes(rows: int) -> int:
    """The next larger of 2, 3, 4, 6, 8, 12, 16, 24, ... rows.

    oneDNN makes and keeps code for every size that it meets. Measured on the demo model, rounds of 64 mixed streams:
    with all sizes the engine grew by 25 MB a round without end. With these 15 sizes all are met within few rounds.
    """
    power = 1 << max(rows - 1, 1).bit_length()
    return power * 3 // 4 if 4 <= power and rows <= power * 3 // 4 else power


def with_rows(x: Tensor, rows: int) -> Tensor:
    return x if rows == x.shape[0] else functional.pad(x, (0, 0, 0, rows - x.shape[0]))


@cache
def _onednn_works(dtype: torch.dtype) -> bool:
    """Whether this torch on this processor has the packed route for the dtype: private operators, so they are tried."""
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    weight = torch.eye(16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(y, weight)
