"""Mixture of experts: each token goes through a few experts, and their weighted results are summed.

This version computes one expert at a time: it gathers the expert's tokens and applies its two linear layers. Each
token's results are summed in the order of its experts, so a row's bits depend on that row alone wherever those of
`kernels.linear` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from serve_llm.kernels.linear import Linear

Activation = Callable[[Tensor], Tensor]


class Experts(Protocol):
    """Computes the sum of weight * last(activation(first(x))) over each token's experts that are local.

    x: (tokens, hidden_size). weights, experts: (tokens, top_k) float32 and int64; a token's experts are all different.
    Returns (tokens, hidden_size) in x's dtype; summed in float32, rounded once."""

    reads_back: bool  # on a GPU, the host waits for the numbers of rows of the experts

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor: ...


def pack_experts(pairs: Iterable[tuple[Linear, Linear]], activation: Activation, local_experts: range) -> Experts:
    """pairs: the (first, last) layers of each local expert. local_experts: consecutive ids, may be empty."""
    return _SequentialExperts(list(pairs), activation, local_experts)


class _SequentialExperts:
    reads_back = True

    def __init__(self, pairs: list[tuple[Linear, Linear]], activation: Activation, local_experts: range) -> None:
        self._pairs = pairs
        self._activation = activation
        self._local_experts = local_experts

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, top_k = experts.shape
        flat = experts.flatten()
        order = flat.argsort(stable=True)  # indices into `flat`, by expert
        ends = accumulate(torch.bincount(flat, minlength=self._local_experts.stop).tolist(), initial=0)
        outputs = x.new_zeros((tokens * top_k, x.shape[1]))
        for (first, last), (start, stop) in zip(
            self._pairs, list(pairwise(ends))[self._local_experts.start :], strict=False
        ):
            if start != stop:
                pairs_of_expert = order[start:stop]
                rows = x[pairs_of_expert // top_k]
                rows = first(rows)  # reuse the name to free each intermediate early
                rows = self._activation(rows)
                rows = last(rows)
                outputs[pairs_of_expert] = rows
                del rows
        return weighted_sum(outputs.view(tokens, top_k, x.shape[1]), weights)


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum (tokens, top_k, hidden_size) outputs by (tokens, top_k) float32 weights, in order of the choices.

    Returns (tokens, hidden_size) in the outputs' dtype; summed in float32, rounded once."""
    total = outputs[:, 0].float().mul_(weights[:, :1])
    for choice in range(1, outputs.shape[1]):
        total += outputs[:, choice].float().mul_(weights[:, choice : choice + 1])
    return total.to(outputs.dtype).contiguous()
