"""Sampling from logits whose columns are sharded over the ranks of a tensor-parallel group.

Every rank of the group makes the same calls in the same order with the same rows. How a row is sampled depends only on
its parameters, which all ranks know, and on gathered values, so every rank makes the same collective calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.engine.parallel.groups import ProcessGroup
from serve_llm.engine.sampling.logit_adjustments import SampleRow
from serve_llm.engine.sampling.sampler import SampledToken, Sampler, SamplerOutput, is_greedy, is_unadjusted
from serve_llm.kernels.sampling import SamplingKernels

MAX_CANDIDATES = 128  # largest top_k for which candidates are gathered instead of whole rows
TOO_MANY = -1  # instead of the first candidate's id


class VocabParallelLogits:
    """Collective operations on sharded logits of the LM head's dtype. A single rank may also have padding columns."""

    def __init__(self, shards: Sequence[range], group: ProcessGroup, kernels: SamplingKernels) -> None:
        """shards: each rank's columns, in rank order; some may be empty."""
        self._shards = tuple(shards)
        self._shard = self._shards[group.rank]
        self._max_columns = max(map(len, shards))
        self.size = sum(map(len, shards))
        self.group = group
        self.is_sharded = group.size > 1
        self.kernels = kernels

    def gather(self, logits: Tensor) -> Tensor:
        """(rows, shard) -> (rows, vocab_size) of the same dtype, on every rank."""
        if not self.is_sharded:
            return logits
        parts = self.group.all_gather(functional.pad(logits, (0, self._max_columns - len(self._shard))))
        return torch.cat([part[:, : len(shard)] for part, shard in zip(parts, self._shards, strict=True)], 1)

    def argmax(self, logits: Tensor) -> Tensor:
        """(rows,) int64 on the device: the id of each row's largest logit, the lowest of equal ones; -1 where it is
        not finite. On every rank; none waits for the device."""
        if self._shard:
            ids = self.kernels.argmax(logits)
            values = logits.gather(1, ids.unsqueeze(1)).squeeze(1).float()
        else:
            values = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
            ids = torch.zeros_like(values, dtype=torch.int64)
        values, ids = self._gather_pairs(values, ids)  # (ranks, rows)
        rank = values.argmax(0, keepdim=True)  # the first NaN, else the first maximum
        return torch.where(values.gather(0, rank).isfinite(), ids.gather(0, rank), -1)[0]

    def top_k_candidates(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor, list[int]]:
        """Gather all logits that may be among each row's k largest or equal to the k-th, in order of ids, on every
        rank.

        Returns values (rows, n) float32, with -inf where a rank has fewer; their ids (rows, n); and the rows where too
        many values are equal to gather all. A row that is not finite has a NaN among its values.
        """
        slots = 2 * k
        values = logits.new_full((len(logits), slots), -torch.inf, dtype=torch.float32)
        ids = torch.zeros_like(values, dtype=torch.int64)
        if self._shard:
            for row, top in enumerate(self.kernels.top_k(logits, min(k, len(self._shard)))):
                if len(top) > slots:
                    ids[row, 0] = TOO_MANY - self._shard.start
                else:
                    values[row, : len(top)] = logits[row, top].float()
                    ids[row, : len(top)] = top
        values, ids = self._gather_pairs(values, ids)  # (ranks, rows, slots)
        incomplete = (ids[:, :, 0] == TOO_MANY).any(0).nonzero().flatten().tolist()
        return values.transpose(0, 1).flatten(1), ids.transpose(0, 1).flatten(1), incomplete

    def _gather_pairs(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Gather all ranks' values, float32, and local ids converted to global ones: (ranks, ...) each."""
        bits = (ids + self._shard.start).int().view(torch.float32)  # one gather, of one dtype, carries both
        gathered = torch.stack(self.group.all_gather(torch.stack([values, bits])))  # (ranks, 2, ...)
        return gathered[:, 0], gathered[:, 1].contiguous().view(torch.int32).long()


class VocabParallelSampler:
    """Samples like `Sampler`, but gathers whole rows only for requests that need them."""

    def __init__(self, sampler: Sampler, vocabulary: VocabParallelLogits) -> None:
        self._sampler = sampler
        self._vocabulary = vocabulary
        self._is_output_rank = vocabulary.group.rank == 0

    def start(self, logits: Tensor, rows: Sequence[SampleRow]) -> SamplerOutput:
        """As `sample`. The tokens are ready on return."""
        tokens = self.sample(logits, rows)
        return SamplerOutput(lambda: tokens)

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | None]:
        """Like `Sampler.sample`, on the group's first rank; other ranks' results are unused. logits: (rows, shard)."""
        tokens: list[SampledToken | None] = [None] * len(rows)
        greedy: list[int] = []
        few: list[int] = []
        whole: list[int] = []
        for index, row in enumerate(rows):
            if is_unadjusted(row) and is_greedy(row.sampling):
                greedy.append(index)
            elif is_unadjusted(row) and 0 < row.sampling.top_k <= MAX_CANDIDATES:
                few.append(index)
            else:
                whole.append(index)
        if greedy:
            for index, token_id in zip(greedy, self._vocabulary.argmax(logits[greedy]).tolist(), strict=True):
                tokens[index] = None if token_id < 0 else SampledToken(token_id, None)
        if few:
            whole += self._sample_candidates(logits, rows, few, tokens)
        if whole:
            gathered = self._vocabulary.gather(logits[whole])
            if self._is_output_rank:
                sampled = self._sampler.sample(gathered, [rows[index] for index in whole])
                for index, token in zip(whole, sampled, strict=True):
                    tokens[index] = token
        return tokens

    def _sample_candidates(
        self, logits: Tensor, rows: Sequence[SampleRow], indices: list[int], tokens: list[SampledToken | None]
    ) -> list[int]:
        """Sample rows from their top_k candidates. Returns the rows whose candidates are incomplete."""
        k = max(rows[index].sampling.top_k for index in indices)
        values, ids, incomplete = self._vocabulary.top_k_candidates(logits[indices], k)
        if self._is_output_rank:
            columns = self._sampler.sample_ids(values, [rows[index] for index in indices])
            for place, (index, column) in enumerate(zip(indices, columns, strict=True)):
                tokens[index] = None if column < 0 else SampledToken(int(ids[place, column]), None)
        return [indices[place] for place in incomplete]
