"""Experts by the compiled kernels. The contract is that of `kernels.moe.pack_experts`.

With few rows for each of many experts, one product after another would spend much of the time on calls, and on threads
that wait for each other. So one call multiplies the rows of all experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_int, c_int64, c_void_p
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from serve_llm.kernels import moe
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.cpu.linear import CompiledLinear, Product
from serve_llm.kernels.cpu.linear_grouped import CompiledGroupedLinear, GroupedProduct
from serve_llm.kernels.held_tensors import describe_structures
from serve_llm.kernels.linear import Linear

Arguments = TypeVar("Arguments", Product, GroupedProduct)
MultiplyRows = Callable[[Tensor, Tensor], Tensor]  # see `_LinearBatch.__call__`
MAX_ROWS = 1024  # with more, products take much longer than their calls, and the rows of all experts more memory


class ExpertPacker:
    """Packs experts for one variant of the library."""

    def __init__(self, library: Library) -> None:
        self._weighted_sum = library.function("weighted_sum", c_int, *(c_void_p,) * 3, c_int64, *(c_int,) * 3)
        self._sort = library.function("sort_by_expert", c_void_p, c_int64, *(c_int,) * 3, *(c_void_p,) * 3)

    def pack_experts(
        self,
        pairs: Iterable[tuple[Linear, Linear]],
        activation: moe.Activation,
        local_experts: range,
        adapters: moe.ExpertAdapters | None = None,
    ) -> moe.PackedExperts:
        """See `kernels.moe.pack_experts`."""
        pairs = list(pairs)
        one_by_one = moe.pack_experts(pairs, activation, local_experts, adapters, sum_rows=self.weighted_sum)
        batches = [_combine(layers) for layers in zip(*pairs, strict=True)]
        if len(batches) < 2 or batches[0] is None or batches[1] is None:
            return one_by_one
        return _BatchedExperts(self, one_by_one, batches[0], batches[1], activation, local_experts, adapters)

    def weighted_sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        """See `kernels.moe.weighted_sum`."""
        tokens, top_k, width = rows.shape
        rows = rows.contiguous()
        weights = weights.contiguous()
        total = rows.new_empty((tokens, width))
        self._weighted_sum(
            rows.dtype == torch.bfloat16,
            rows.data_ptr(),
            weights.data_ptr(),
            total.data_ptr(),
            tokens,
            top_k,
            width,
            torch.get_num_threads(),
        )
        return total

    def sort_by_expert(self, experts: Tensor, local_experts: range) -> tuple[Tensor, Tensor, Tensor]:
        """See `kernels.moe.sort_by_expert`. Returns the tokens of the pairs, too, after their order."""
        experts = experts.contiguous()
        order = torch.empty(experts.numel(), dtype=torch.int64)
        tokens = torch.empty_like(order)
        bounds = torch.empty(len(local_experts) + 1, dtype=torch.int64)
        self._sort(
            experts.data_ptr(),
            len(order),
            experts.shape[1],
            local_experts.start,
            local_experts.stop,
            order.data_ptr(),
            tokens.data_ptr(),
            bounds.data_ptr(),
        )
        return order, tokens, bounds


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
    variant_index: int
    multiply_batch: Callable[..., None]

    def describe_rows(self, product: Arguments, x: Tensor, y: Tensor) -> object: ...


class _LinearBatch(Generic[Arguments]):
    """Layers that differ only in the contents of their tensors, each applied to its own rows, in one call."""

    def __init__(self, layers: Sequence[_CompiledLayer[Arguments]], structure: type[Arguments]) -> None:
        self._layers: Sequence[_CompiledLayer[Arguments]] = layers
        self._products: ctypes.Array[Arguments] = (structure * len(layers))(*(layer.product for layer in layers))
        self._all_rows: Arguments = structure.from_buffer_copy(layers[0].product)
        self._outputs: int = layers[0].product.outputs

    def __call__(self, x: Tensor, bounds: Tensor) -> Tensor:
        """x: (rows, inputs). bounds: (layers + 1,) int64; layer i multiplies rows bounds[i] to bounds[i + 1] - 1.

        Returns (rows, outputs), zeros for rows without a layer."""
        first = self._layers[0]
        y = x.new_empty((x.shape[0], self._outputs)).zero_()
        read = first.describe_rows(self._all_rows, x, y)
        first.multiply_batch(
            ctypes.byref(self._all_rows),
            ctypes.addressof(self._products),
            bounds.data_ptr(),
            len(self._layers),
            first.variant_index,
            torch.get_num_threads(),
        )
        del read  # the kernel has read it
        return y


class _BatchedExperts:
    reads_back = False

    def __init__(
        self,
        packer: ExpertPacker,
        one_by_one: moe.PackedExperts,
        first: MultiplyRows,
        last: MultiplyRows,
        activation: moe.Activation,
        local_experts: range,
        adapters: moe.ExpertAdapters | None,
    ) -> None:
        """one_by_one: for steps with adapters and for many rows."""
        self._packer = packer
        self._one_by_one = one_by_one
        self._first = first
        self._last = last
        self._activation = activation
        self._local_experts = local_experts
        self._adapters = adapters

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, top_k = experts.shape
        if tokens * top_k > MAX_ROWS or (self._adapters is not None and self._adapters.is_used):
            return self._one_by_one(x, weights, experts)
        order, numbers, bounds = self._packer.sort_by_expert(experts, self._local_experts)
        rows = self._first(x[numbers], bounds)
        rows = self._activation(rows)
        rows = self._last(rows, bounds)
        outputs = torch.empty_like(rows)
        outputs[order] = rows
        del rows  # before the sums are allocated
        return self._packer.weighted_sum(outputs.view(tokens, top_k, x.shape[1]), weights)

    def list_local_experts(self) -> list[moe.LocalExpert]:
        """See `kernels.moe.PackedExperts`."""
        return self._one_by_one.list_local_experts()
