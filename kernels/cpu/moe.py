"""Experts by the compiled kernels. The contract is that of `kernels.moe.pack_experts`.

With few rows for each of many experts, one product after another would spend much of the time on calls, and on threads
that wait for each other. So one call multiplies the rows of all experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from serve_llm.kernels import moe
from serve_llm.kernels.cpu.linear import CompiledLinear, Product
from serve_llm.kernels.cpu.linear_grouped import CompiledGroupedLinear, GroupedProduct
from serve_llm.kernels.held_tensors import describe_structures
from serve_llm.kernels.linear import Linear

Arguments = TypeVar("Arguments", Product, GroupedProduct)
MultiplyRows = Callable[[Tensor, Tensor], Tensor]  # see `_LinearBatch.__call__`
MOST_ROWS = 1024  # with more, products take much longer than their calls, and the rows of all experts more memory


def pack_experts(
    pairs: Iterable[tuple[Linear, Linear]],
    activation: moe.Activation,
    local_experts: range,
    adapters: moe.ExpertAdapters | None = None,
) -> moe.PackedExperts:
    """See `kernels.moe.pack_experts`."""
    pairs = list(pairs)
    one_by_one = moe.pack_experts(pairs, activation, local_experts, adapters)
    batches = [_combine(layers) for layers in zip(*pairs, strict=True)]
    if len(batches) < 2 or batches[0] is None or batches[1] is None:
        return one_by_one
    return _BatchedExperts(one_by_one, batches[0], batches[1], activation, local_experts, adapters)


def _combine(layers: Sequence[Linear]) -> MultiplyRows | None:
    """Return None unless the layers are compiled and differ only in the contents of their tensors."""
    if len({describe_structures(layer) for layer in layers}) > 1:
        return None
    linear = [layer for layer in layers if isinstance(layer, CompiledLinear)]
    if len(linear) == len(layers):
        return _LinearBatch(linear, Product)
    grouped = [layer for layer in layers if isinstance(layer, CompiledGroupedLinear) and not layer.reorders_inputs]
    return _LinearBatch(grouped, GroupedProduct) if len(grouped) == len(layers) else None


class _CompiledLayer(Protocol[Arguments]):
    product: Arguments
    variant: int
    multiply_batch: Callable[..., None]

    def describe_rows(self, product: Arguments, x: Tensor, y: Tensor) -> object: ...


class _LinearBatch(Generic[Arguments]):
    """Layers that differ only in the contents of their tensors, each applied to its own rows, in one call."""

    def __init__(self, layers: Sequence[_CompiledLayer[Arguments]], structure: type[Arguments]) -> None:
        self._layers: Sequence[_CompiledLayer[Arguments]] = layers
        self._products: ctypes.Array[Arguments] = (structure * len(layers))(*(layer.product for layer in layers))
        self._all_rows: Arguments = structure.from_buffer_copy(layers[0].product)
        self._outputs: int = layers[0].product.outputs

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """x: (rows, inputs). ends: (layers,) int64; layer i multiplies rows ends[i - 1] to ends[i] - 1.

        Returns (rows, outputs)."""
        first = self._layers[0]
        y = x.new_empty((x.shape[0], self._outputs))
        read = first.describe_rows(self._all_rows, x, y)
        first.multiply_batch(
            ctypes.addressof(self._all_rows),
            ctypes.addressof(self._products),
            ends.data_ptr(),
            len(self._layers),
            first.variant,
            torch.get_num_threads(),
        )
        del read  # the kernel has read it
        return y


class _BatchedExperts:
    reads_back = True

    def __init__(
        self,
        one_by_one: moe.PackedExperts,
        first: MultiplyRows,
        last: MultiplyRows,
        activation: moe.Activation,
        local_experts: range,
        adapters: moe.ExpertAdapters | None,
    ) -> None:
        """one_by_one: for steps with adapters and for many rows."""
        self._one_by_one = one_by_one
        self._first = first
        self._last = last
        self._activation = activation
        self._local_experts = local_experts
        self._adapters = adapters

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, top_k = experts.shape
        if tokens * top_k > MOST_ROWS or (self._adapters is not None and self._adapters.is_used):
            return self._one_by_one(x, weights, experts)
        order, bounds = moe.sort_by_expert(experts, self._local_experts)
        local = order[bounds[0] : bounds[-1]]
        ends = bounds[1:] - bounds[0]
        rows = self._first(x[local // top_k], ends)
        rows = self._activation(rows)
        rows = self._last(rows, ends)
        outputs = x.new_zeros((tokens * top_k, x.shape[1]))
        outputs[local] = rows
        del rows  # before the sums are allocated
        return moe.weighted_sum(outputs.view(tokens, top_k, x.shape[1]), weights)

    def list_local_experts(self) -> list[moe.LocalExpert]:
        """See `kernels.moe.PackedExperts`."""
        return self._one_by_one.list_local_experts()
