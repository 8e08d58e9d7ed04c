"""Mixture of experts: each token goes through a few experts, and their weighted results are summed.

This version computes one expert at a time: it gathers the expert's tokens and applies its two linear layers. Each
token's results are summed in the order of its experts, so a row's bits depend on that row alone if that is true of
`kernels.linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.kernels.held_tensors import describe_structures, find_tensors
from serve_llm.kernels.linear import Linear

Activation = Callable[[Tensor], Tensor]
SumRows = Callable[[Tensor, Tensor], Tensor]  # see `weighted_sum`


class Experts(Protocol):
    """Computes the sum of weight * last(activation(first(x))) over each token's local experts.

    x: (tokens, hidden_size). weights, experts: (tokens, top_k) float32 and int64; a token's experts are all different.
    Returns (tokens, hidden_size) in x's dtype; summed in float32, rounded once."""

    reads_back: bool  # on a GPU, the host waits for the experts' row counts

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor: ...


class PackedExperts(Experts, Protocol):
    """Experts with their weights."""

    def list_local_experts(self) -> list[LocalExpert]:
        """How each local expert is held."""


class LocalExpert(NamedTuple):
    """The tensors of an expert's weights, which may be overwritten with those of another expert of the same form."""

    tensors: list[Tensor]
    form: str  # all other kernel parameters of the expert
    is_compiled: bool  # the weights are a copy, in the layout of our own kernels


class ExpertAdapters(Protocol):
    """LoRA adapters of the local experts' layers."""

    @property
    def is_used(self) -> bool:
        """Whether the step has rows with an adapter that changes an expert."""

    def add_to_first(self, expert: int, y: Tensor, x: Tensor, tokens: Tensor) -> None:
        """Add the adapters' products with x, (rows, inputs), to y, (rows, outputs).

        expert: index among the local ones. tokens: (rows,) int64, indices of the tokens of the step."""

    def add_to_last(self, expert: int, y: Tensor, x: Tensor, tokens: Tensor) -> None: ...


def pack_experts(
    pairs: Iterable[tuple[Linear, Linear]],
    activation: Activation,
    local_experts: range,
    adapters: ExpertAdapters | None = None,
    *,
    sum_rows: SumRows | None = None,
) -> PackedExperts:
    """pairs: the (first, last) layers of each local expert. local_experts: consecutive ids, may be empty. adapters:
    added to the layers' results. sum_rows: None for `weighted_sum`."""
    return _SequentialExperts(list(pairs), activation, local_experts, adapters, sum_rows or weighted_sum)


class _SequentialExperts:
    reads_back = True

    def __init__(
        self,
        pairs: list[tuple[Linear, Linear]],
        activation: Activation,
        local_experts: range,
        adapters: ExpertAdapters | None,
        sum_rows: SumRows,
    ) -> None:
        self._pairs = pairs
        self._sum_rows = sum_rows
        self._activation = activation
        self._local_experts = local_experts
        self._adapters = adapters

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, top_k = experts.shape
        order, bounds = sort_by_expert(experts, self._local_experts)
        outputs = x.new_zeros((tokens * top_k, x.shape[1]))
        adapters = self._adapters if self._adapters is not None and self._adapters.is_used else None
        spans = pairwise(bounds.tolist())
        for index, ((first, last), (start, stop)) in enumerate(zip(self._pairs, spans, strict=True)):
            if start == stop:
                continue
            pairs_of_expert = order[start:stop]
            numbers = pairs_of_expert // top_k
            inputs = x[numbers]
            rows = first(inputs)
            if adapters is not None:
                adapters.add_to_first(index, rows, inputs, numbers)
            inputs = self._activation(rows)
            del rows  # before the next product is allocated
            rows = last(inputs)
            if adapters is not None:
                adapters.add_to_last(index, rows, inputs, numbers)
            outputs[pairs_of_expert] = rows
            del inputs, rows
        return self._sum_rows(outputs.view(tokens, top_k, x.shape[1]), weights)

    def list_local_experts(self) -> list[LocalExpert]:
        """See `PackedExperts`."""
        local_experts = []
        for pair in self._pairs:
            tensors = [list(find_tensors(layer)) for layer in pair]
            forms = [describe_structures(layer) for layer in pair]
            is_compiled = all(form or not found for form, found in zip(forms, tensors, strict=True))
            local_experts.append(LocalExpert(tensors[0] + tensors[1], str(forms), is_compiled))
        return local_experts


def sort_by_expert(experts: Tensor, local_experts: range) -> tuple[Tensor, Tensor]:
    """Sort the pairs of a token and one of its experts by expert.

    experts: (tokens, top_k) int64. Returns indices into the flattened `experts`, and bounds, (local experts + 1,)
    int64: those of local expert i are at bounds[i] to bounds[i + 1] - 1."""
    flat = experts.flatten()
    ends = torch.bincount(flat, minlength=local_experts.stop).cumsum(0)
    bounds = functional.pad(ends, (1, 0))[local_experts.start : local_experts.stop + 1]
    return flat.argsort(stable=True), bounds


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum (tokens, top_k, hidden_size) outputs by (tokens, top_k) float32 weights, in order of the choices.

    Returns (tokens, hidden_size) in the outputs' dtype; summed in float32, rounded once."""
    total = outputs[:, 0].float().mul_(weights[:, :1])
    for choice in range(1, outputs.shape[1]):
        total += outputs[:, choice].float().mul_(weights[:, choice : choice + 1])
    return total.to(outputs.dtype).contiguous()
