"""Experts distributed over data-parallel engines: a rank sends its tokens' rows to the ranks that hold the experts.

Rows go out sorted by the slot that computes them, and therefore by rank, and come back in the same order. The sum over
a token's experts is that of `kernels.moe`: weighted, in float32, in order of the choices, rounded once. A row's bits
are the same as if one rank held all these experts, whatever tokens the other ranks bring and wherever experts are, if
the kernels compute a row independently of the others (always on a CPU, with `--batch-invariant` on a GPU).
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from serve_llm.engine.model.expert_placement import Placement
from serve_llm.engine.parallel.groups import AllToAllGroup
from serve_llm.kernels.moe import PackedExperts, weighted_sum


class ExpertDispatch:
    """`kernels.moe.Experts` of all ranks of a group. All must call it, or `run_without_tokens`, at the same time."""

    reads_back = True

    def __init__(self, experts: PackedExperts, span: range, placement: Placement, group: AllToAllGroup) -> None:
        """experts: those of this rank, numbered by its slots. span: the numbers of the group's experts. placement:
        where they are."""
        self.experts = experts
        self.span = span
        self.group = group
        self.num_rows: Tensor | None = None  # (experts,) int64: if set, counts the rows of all ranks
        self.place(placement)

    def place(self, placement: Placement) -> None:
        """Use this placement from now on. All ranks must call this between the same steps."""
        self.placement = placement
        slots = [expert - self.span.start for expert in chain.from_iterable(placement)]
        seen: Counter[int] = Counter()
        copies = [0] * len(slots)  # which of its expert's copies each slot holds
        for slot, expert in enumerate(slots):
            copies[slot] = seen[expert]
            seen[expert] += 1
        borders = accumulate(map(len, placement), initial=0)
        self._rank_slots = [slice(start, stop) for start, stop in pairwise(borders)]
        self._slots: _Slots | None = None
        if slots != list(range(len(self.span))):
            self._slots = _Slots(
                torch.tensor(slots),
                torch.tensor(copies),
                torch.tensor([seen[expert] for expert in slots]),
                torch.tensor(sorted(range(len(slots)), key=lambda slot: (slots[slot], copies[slot]))),
            )

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, top_k = experts.shape
        flat = experts.flatten()
        counts = torch.bincount(flat, minlength=self.span.stop)
        before = counts[: self.span.start].sum()
        counts = counts[self.span.start : self.span.stop]
        order = flat.argsort(stable=True)[before : before + counts.sum()]  # indices into `flat`, expert by expert
        counts_by_slot = self._exchange_counts(counts)
        if self._slots is not None:
            order = order[self._slots.sort_rows(counts_by_slot[self.group.rank])]  # slot by slot
        outputs = self._exchange(x[order // top_k], counts_by_slot)
        by_token = x.new_zeros((tokens * top_k, x.shape[1]))
        by_token[order] = outputs
        return weighted_sum(by_token.view(tokens, top_k, -1), weights)

    def run_without_tokens(self, empty: Tensor) -> None:
        """Only compute rows of other ranks. empty: (0, hidden_size), of the model's dtype."""
        counts = torch.zeros(len(self.span), dtype=torch.int64, device=empty.device)
        self._exchange(empty, self._exchange_counts(counts))

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """counts: (experts,) int64, rows that this rank has for each. Returns how many each rank sends to each slot,
        (ranks, slots), on the host."""
        counts_by_rank = torch.stack(self.group.all_gather(counts)).cpu()
        if self.num_rows is not None:
            self.num_rows += counts_by_rank.sum(0)
        return counts_by_rank if self._slots is None else self._slots.divide(counts_by_rank)

    def _exchange(self, rows: Tensor, counts_by_slot: Tensor) -> Tensor:
        """Send rows to their experts and return the experts' outputs in the same order.

        rows: (rows, hidden_size), slot by slot. counts_by_slot: what `_exchange_counts` returns.
        """
        sent = [[sum(line[slots]) for slots in self._rank_slots] for line in counts_by_slot.tolist()]
        rows = self.group.all_to_all(rows, sent)  # reuses the name, to free the sent rows
        if len(rows):
            own_counts = counts_by_slot[:, self._rank_slots[self.group.rank]]
            slots = torch.arange(own_counts.shape[1])
            numbers = torch.cat([slots.repeat_interleave(line) for line in own_counts]).to(rows.device)
            rows = self.experts(rows, rows.new_ones((len(rows), 1), dtype=torch.float32), numbers[:, None])
        returned = [list(counts) for counts in zip(*sent, strict=True)]
        return self.group.all_to_all(rows, returned)


class _Slots:
    """A placement with copies of experts, or in an order that differs from that of the experts."""

    def __init__(self, experts: Tensor, copies: Tensor, num_copies: Tensor, by_expert: Tensor) -> None:
        """All (slots,) int64: the expert of each slot, which of its copies that is, how many there are, and the slots
        sorted by expert and copy."""
        self._experts = experts
        self._copies = copies
        self._num_copies = num_copies
        self._by_expert = by_expert

    def divide(self, counts_by_rank: Tensor) -> Tensor:
        """How many rows each rank sends to each slot, (ranks, slots): rows of an expert are divided evenly among its
        copies, beginning with another copy on each rank. counts_by_rank: (ranks, experts)."""
        counts = counts_by_rank[:, self._experts]
        ranks = torch.arange(len(counts)).unsqueeze(1)
        return counts // self._num_copies + ((self._copies - ranks) % self._num_copies < counts % self._num_copies)

    def sort_rows(self, lengths: Tensor) -> Tensor:
        """Return the indices that sort a rank's rows from expert by expert to slot by slot. lengths: (slots,), rows of
        each."""
        starts = torch.empty_like(lengths)
        sorted_lengths = lengths[self._by_expert]
        starts[self._by_expert] = sorted_lengths.cumsum(0) - sorted_lengths
        sorted_starts = lengths.cumsum(0) - lengths
        return torch.arange(int(lengths.sum())) + (starts - sorted_starts).repeat_interleave(lengths)
