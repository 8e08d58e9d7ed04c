"""Experts of a mixture: each token goes through a few of them, and their results are summed. Knows tensors only.

Here expert by expert: the tokens of each are gathered, and its two products are computed as any linear layer's. So a
row's bits depend on that row alone wherever those of `kernels.linear` do: the sum is taken token by token, in the order
in which the token's experts are given.
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
    """x: (tokens, width); weights, experts: (tokens, chosen), float32 and int64, each token's experts all different ->
    (tokens, width), dtype of x: the sum of weight * last(activation(first(x))) over the chosen experts that are held
    here, the others adding nothing; added in float32, rounded once."""

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor: ...


def pack_experts(pairs: Iterable[tuple[Linear, Linear]], activation: Activation, own: range) -> Experts:
    """pairs: (first, last) of each expert in `own`, which are consecutive numbers and may be none."""
    return _OneByOne(list(pairs), activation, own)


class _OneByOne:
    def __init__(self, pairs: list[tuple[Linear, Linear]], activation: Activation, own: range) -> None:
        self._pairs, self._activation, self._own = pairs, activation, own

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, chosen = experts.shape
        flat = experts.flatten()
        order = flat.argsort(stable=True)  # places in `flat`, expert by expert
        ends = accumulate(torch.bincount(flat, minlength=self._own.stop).tolist(), initial=0)
        made = x.new_zeros((tokens * chosen, x.shape[1]))
        for (first, last), (start, stop) in zip(self._pairs, list(pairwise(ends))[self._own.start :], strict=False):
            if start != stop:
                places = order[start:stop]
                rows = x[places // chosen]
                rows = first(rows)  # the same name: nothing holds what is done with any longer
                rows = self._activation(rows)
                rows = last(rows)
                made[places] = rows
                del rows
        return weighted_sum(made.view(tokens, chosen, x.shape[1]), weights)


def weighted_sum(made: Tensor, weights: Tensor) -> Tensor:
    """made: (tokens, chosen, width), may be overwritten; weights: (tokens, chosen) float32 -> (tokens, width), dtype of
    made: added in order in float32, rounded once."""
    total = made[:, 0].float().mul_(weights[:, :1])
    for place in range(1, made.shape[1]):
        total += made[:, place].float().mul_(weights[:, place : place + 1])
    return total.to(made.dtype).contiguous()
