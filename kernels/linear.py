"""Linear layers whose weights are packed into the fastest layout once, when they are loaded.

Routes on a CPU, with the bytes of weights that they read per second for one row (8192x2048 bf16):

    oneDNN, packed   bf16 and float32   77 GB/s   private operators of torch: used where they exist and work
    functional       everything else    22 GB/s

A CPU uses both only if serve-llm was installed without a C++ compiler; otherwise it uses `kernels.cpu.linear`.

Batch invariance on a CPU: a row's bits must not depend on the number of rows. Measured on AMD (24 shapes, 1 to 2047
rows, 1 to 16 threads): oneDNN gives equal bits for all numbers of rows from 2 up, but other bits for one row of some
shapes; functional float32 gives equal bits only at multiples of 16. On Intel with AMX more numbers differ. So only
a few numbers of rows are used: the input is padded with zero rows to one of them, and each shape is tried with all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.kernels.invariance import BatchInvarianceChecker, LayerKind

MAX_ROWS = 256  # per call; arithmetic then bounds the product, so reading weights again is free
MIN_ROWS = 16
TRIAL_COST = 2 * 10**9  # multiplications of one call: some milliseconds


class Linear(Protocol):
    """x: (rows, inputs) -> (rows, outputs), in the weight's dtype."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


def pack(
    weight: Tensor,
    bias: Tensor | None = None,
    merged: Sequence[Tensor] = (),
    *,
    checker: BatchInvarianceChecker | None = None,
) -> Linear:
    """Build the layer x @ weight.T + bias. weight: (outputs, inputs); bias: (outputs,) or None; on their final device.

    merged: weights of the same inputs and dtype, whose outputs follow those of `weight`; the bias covers all outputs.
    The caller should drop the weights afterwards, because the result may hold a copy in another layout. There may be no
    outputs or no inputs; without inputs the result is the bias, or zeros. checker: the model's, which tries each kind
    of layer once; None: try this layer by itself.
    """
    weight = torch.cat((weight, *merged)) if merged else weight.contiguous()
    if weight.numel() == 0 or weight.device.type != "cpu":
        return TorchLinear(weight, bias)
    # Limits the time of the test. Only large layers are tested with few rows, which are enough for them.
    max_rows = few_sizes(min(max(TRIAL_COST // weight.numel(), MIN_ROWS), MAX_ROWS))
    if _onednn_works(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        layer = _FewSizes(_OneDNNLinear(packed, bias), max_rows, multiple=1)
        route = "oneDNN"
    else:
        layer = _FewSizes(TorchLinear(weight, bias), max_rows, multiple=16)
        route = "torch"
    kind = LayerKind(route, weight.shape[0], weight.shape[1], weight.dtype)
    return (checker or BatchInvarianceChecker()).make_invariant(layer, kind, max_rows)


def pack_heads(weight: Tensor, *, pack: Callable[[Tensor], Linear] = pack) -> Linear:
    """Build one product per head: x (rows, heads, inputs) -> (rows, heads, outputs). weight: (heads, outputs, inputs).
    pack: packs the weight of one head, on a CPU; elsewhere the product is one batched product."""
    if weight.device.type == "cpu":
        heads = [pack(one) for one in weight]
        shape = weight.shape[:2]

        def one_by_one(x: Tensor) -> Tensor:
            y = x.new_empty((x.shape[0], *shape))
            for index, head in enumerate(heads):
                y[:, index] = head(x[:, index])
            return y

        return one_by_one
    turned = weight.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return lambda x: torch.bmm(x.transpose(0, 1), turned).transpose(0, 1)


@dataclass(frozen=True)
class _OneDNNLinear:
    weight: Tensor  # opaque layout
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


@dataclass(frozen=True)
class TorchLinear:
    """The unchanged weight: (outputs, inputs)."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class _FewSizes:
    """Calls a layer with a few numbers of rows only, at most `max_rows`, all multiples of `multiple`."""

    layer: Linear
    max_rows: int
    multiple: int

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) <= self.max_rows:
            return self._piece(x)
        pieces = [x[start : start + self.max_rows] for start in range(0, len(x), self.max_rows)]
        return torch.cat([self._piece(piece) for piece in pieces])

    def _piece(self, x: Tensor) -> Tensor:
        size = -(-few_sizes(len(x)) // self.multiple) * self.multiple
        return self.layer(with_rows(x, size))[: len(x)]


def few_sizes(rows: int) -> int:
    """Round up to one of 2, 3, 4, 6, 8, 12, 16, 24, ... rows.

    oneDNN compiles and keeps code for every size. Measured on the demo model in rounds of 64 mixed streams: with all
    sizes, the engine grew by 25 MB a round without end; with these 15 sizes it stops growing after a few rounds.
    """
    power = 1 << max(rows - 1, 1).bit_length()
    return power * 3 // 4 if 4 <= power and rows <= power * 3 // 4 else power


def with_rows(x: Tensor, rows: int) -> Tensor:
    return x if rows == x.shape[0] else functional.pad(x, (0, 0, 0, rows - x.shape[0]))


@cache
def _onednn_works(dtype: torch.dtype) -> bool:
    """Whether the packed route works for the dtype here. It uses private operators, so try them."""
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    weight = torch.eye(16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(y, weight)
