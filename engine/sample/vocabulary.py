"""Logits whose columns are shared out over the ranks of a stage, and what a sampler needs of them.

Every rank of the group calls the same methods in the same order, with the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.engine.parallel.comm import Group
from serve_llm.kernels.sampling import SamplingKernels

TOO_MANY = -1  # stands in place of the first candidate's id


class Vocabulary:
    """shares: each rank's columns, in rank order; some may be empty. Logits come in the head's dtype, and of one rank
    may have more columns, which are padding of the head."""

    def __init__(self, shares: Sequence[range], group: Group, kernels: SamplingKernels) -> None:
        self._shares = tuple(shares)
        self._own = self._shares[group.rank]
        self.size = sum(map(len, shares))
        self._widest = max(map(len, shares))
        self.group = group
        self.is_shared_out = group.size > 1
        self.kernels = kernels

    def whole(self, logits: Tensor) -> Tensor:
        """(rows, own) -> (rows, vocab_size) of the same dtype, on every rank."""
        if not self.is_shared_out:
            return logits
        parts = self.group.all_gather(functional.pad(logits, (0, self._widest - len(self._own))))
        return torch.cat([part[:, : len(own)] for part, own in zip(parts, self._shares, strict=True)], 1)

    def likeliest(self, logits: Tensor) -> Tensor:
        """(rows,) int64 on the device: the id of each row's largest logit, of equal ones the lowest; -1 where that is
        not finite. On every rank, none of which waits for the device."""
        if self._own:
            ids = self.kernels.likeliest(logits)
            values = logits.gather(1, ids.unsqueeze(1)).squeeze(1).float()
        else:
            values = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
            ids = torch.zeros_like(values, dtype=torch.int64)
        values, ids = self._gather(values, ids)  # (ranks, rows)
        rank = values.argmax(0, keepdim=True)  # the first NaN, else the first of equals
        return torch.where(values.gather(0, rank).isfinite(), ids.gather(0, rank), -1)[0]

    def candidates(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor, list[int]]:
        """All that can be among each row's k largest logits or equal to the k-th, in the order of ids.

        Returns values (rows, n) float32, with -inf where a rank has fewer; their ids (rows, n); and the rows where so
        many are equal that some are missing. A row that is not finite has a NaN among its values. On every rank.
        """
        slots = 2 * k
        values = logits.new_full((len(logits), slots), -torch.inf, dtype=torch.float32)
        ids = torch.zeros_like(values, dtype=torch.int64)
        for row, found in enumerate(self.kernels.largest(logits, min(k, len(self._own))) if self._own else []):
            if len(found) > slots:
                ids[row, 0] = TOO_MANY - self._own.start
            else:
                values[row, : len(found)] = logits[row, found].float()
                ids[row, : len(found)] = found
        values, ids = self._gather(values, ids)  # (ranks, rows, slots)
        missing = (ids[:, :, 0] == TOO_MANY).any(0).nonzero().flatten().tolist()
        return values.transpose(0, 1).flatten(1), ids.transpose(0, 1).flatten(1), missing

    def _gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """All ranks' values float32 and local ids as global ones, one behind the other."""
        bits = (ids + self._own.start).int().view(torch.float32)  # one gather, of one dtype, carries both
        both = torch.stack(self.group.all_gather(torch.stack([values, bits])))  # (ranks, 2, ...)
        return both[:, 0], both[:, 1].contiguous().view(torch.int32).long()
