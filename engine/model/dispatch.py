"""Expert parallelism over ranks with different tokens: each token's hidden state goes to the ranks that hold its
experts, and their outputs come back.

The weighted sum is taken on the token's rank, over its experts in order, so its bits are those of a rank that holds all
of these experts, whatever tokens the other ranks bring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_llm.engine.parallel.groups import AllToAll
from serve_llm.kernels.moe import Experts, weighted_sum


class ExpertDispatch:
    """`Experts` of all ranks of a group. All ranks must call it, or `run_without_tokens`, at the same time."""

    reads_back = True

    def __init__(self, experts: Experts, spans: Sequence[range], group: AllToAll) -> None:
        """experts: those of this rank. spans: the expert numbers of each rank of the group, consecutive."""
        self._experts = experts
        self._group = group
        self._all = range(spans[0].start, spans[-1].stop)
        self._own = spans[group.rank]
        self._spans = [slice(span.start - self._all.start, span.stop - self._all.start) for span in spans]

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, top_k = experts.shape
        flat = experts.flatten()
        counts = torch.bincount(flat, minlength=self._all.stop)
        before = counts[: self._all.start].sum()
        counts = counts[self._all.start : self._all.stop]
        order = flat.argsort(stable=True)[before : before + counts.sum()]  # indices into `flat`, expert by expert
        outputs = self._exchange(x[order // top_k], counts)
        by_token = x.new_zeros((tokens * top_k, x.shape[1]))
        by_token[order] = outputs
        return weighted_sum(by_token.view(tokens, top_k, -1), weights)

    def run_without_tokens(self, empty: Tensor) -> None:
        """Only compute what other ranks ask for. empty: (0, hidden_size), of the model's dtype."""
        self._exchange(empty, torch.zeros(len(self._all), dtype=torch.int64, device=empty.device))

    def _exchange(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows to their experts and return the experts' outputs in the same order.

        rows: (rows, hidden_size), expert by expert. counts: (experts of the group,) int64, rows of each.
        """
        counts_by_rank = torch.stack(self._group.all_gather(counts))  # (ranks, experts)
        sent = [[sum(line[span]) for span in self._spans] for line in counts_by_rank.tolist()]
        rows = self._group.all_to_all(rows, sent)  # reuse the name to free what was sent
        if len(rows):
            expert_ids = torch.arange(self._own.start, self._own.stop, device=rows.device)
            own_counts = counts_by_rank[:, self._spans[self._group.rank]]
            numbers = torch.cat([expert_ids.repeat_interleave(line) for line in own_counts])
            rows = self._experts(rows, rows.new_ones((len(rows), 1), dtype=torch.float32), numbers[:, None])
        returned = [list(counts) for counts in zip(*sent, strict=True)]
        return self._group.all_to_all(rows, returned)
