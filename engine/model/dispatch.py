"""Experts that are spread over ranks with different tokens: each token's row goes to the ranks that hold its experts,
and what these make of it comes back. Knows no engine and no step.

Sums are taken where the token is, over its experts in their order, of rows that have the bits that they would have
there. So the result is that of a rank which holds all of these experts, whatever the other ranks bring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_llm.engine.parallel.comm import Exchange
from serve_llm.kernels.moe import Experts, weighted_sum


class Dispatch:
    """See `Experts`, but that all ranks of the exchange call it, or `idle`, at the same time."""

    def __init__(self, experts: Experts, spans: Sequence[range], exchange: Exchange) -> None:
        """experts: held here. spans: those of each rank of the exchange, one range after the other."""
        self._experts, self._exchange = experts, exchange
        self._held = range(spans[0].start, spans[-1].stop)
        self._own = spans[exchange.rank]
        self._spans = [slice(span.start - self._held.start, span.stop - self._held.start) for span in spans]

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, chosen = experts.shape
        flat = experts.flatten()
        counts = torch.bincount(flat, minlength=self._held.stop)
        before = counts[: self._held.start].sum()
        counts = counts[self._held.start : self._held.stop]
        places = flat.argsort(stable=True)[before : before + counts.sum()]  # in `flat`, expert by expert
        found = self._computed(x[places // chosen], counts)
        made = x.new_zeros((tokens * chosen, x.shape[1]))
        made[places] = found
        return weighted_sum(made.view(tokens, chosen, -1), weights)

    def idle(self, nothing: Tensor) -> None:
        """Only compute what other ranks ask for. nothing: (0, width) of the model's dtype."""
        self._computed(nothing, torch.zeros(len(self._held), dtype=torch.int64, device=nothing.device))

    def _computed(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: (rows, width), expert by expert. counts: (experts held by all,) int64, rows of each. What the experts
        make of them, in the same order."""
        asked = torch.stack(self._exchange.all_gather(counts))  # (ranks, experts)
        by_expert = asked.tolist()
        sent = [[sum(line[span]) for span in self._spans] for line in by_expert]
        rows = self._exchange.all_to_all(rows, sent)  # the same name: nothing holds what was sent any longer
        if len(rows):
            own = torch.arange(self._own.start, self._own.stop, device=rows.device)
            numbers = torch.cat([own.repeat_interleave(line) for line in asked[:, self._spans[self._exchange.rank]]])
            rows = self._experts(rows, rows.new_ones((len(rows), 1), dtype=torch.float32), numbers[:, None])
        back = [list(counts) for counts in zip(*sent, strict=True)]
        return self._exchange.all_to_all(rows, back)
