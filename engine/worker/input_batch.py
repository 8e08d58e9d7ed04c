"""The live requests of one worker, and a step's inputs gathered from them.

Each request keeps one permanent index, at which its ids, sampling parameters and block tables are stored. Only `apply`
changes them, before a step; the inputs of a step are copies, so nothing that a running step reads changes. If a step
starts before the last one's result has arrived, the newest id of a request is known to the device alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve_llm.common.types import Sampling
from serve_llm.engine.model.inputs import LONG_ROPE_OFFSET, ChunkInputs, KVGroupInputs, StepInputs
from serve_llm.engine.scheduler.output import ScheduledTokens, SchedulerOutput
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.worker.attention_chunks import ChunkedSequences, count_crossings, split_sequences
from serve_llm.kernels.attention import Lengths

LAST_SAMPLED = -1  # instead of an id: the id sampled last for this request, see `LastTokenIds`

FEW_SEQUENCES = 8  # up to so many, a loop takes less time than operations on arrays

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RequestState:
    """A worker's data about a live request, besides its ids and block tables."""

    sampling: Sampling
    num_prompt: int
    prompt_ids: Ints
    later_ids: Ints  # the known ids after the prompt, and space for later ones; a view
    prompt_logprobs: int | None
    pooling: bool
    pools_tokens: bool
    second_text_start: int | None
    adapter_slot: int | None = None


@dataclass(frozen=True)
class HostInputs:
    """One step's inputs on the host; see `StepInputs`. Copies, which later calls of `apply` do not change."""

    ids: Ints  # (tokens,); LAST_SAMPLED for a token that is only on the device so far
    req_indices: Ints  # (tokens,)
    positions: Ints  # (tokens,)
    query_starts: Ints  # (requests + 1,)
    context_lens: Ints  # (requests,)
    groups: Sequence[KVCacheSpec]
    slots: Sequence[Ints]  # per group
    tables: Sequence[np.ndarray]  # per group
    all_known: bool  # no id is LAST_SAMPLED
    adapter_slots: Ints | None = None  # (tokens,), -1 for a token without an adapter; None: no token has one

    def split(self) -> HostInputs:
        """Split into one sequence per token, which ends there, so that every sequence has a single new token."""
        counts = np.diff(self.query_starts)
        num_tokens = len(self.ids)
        num_later = np.repeat(self.query_starts[1:], counts) - np.arange(num_tokens) - 1  # in the token's sequence
        return replace(
            self,
            query_starts=np.arange(num_tokens + 1),
            context_lens=np.repeat(self.context_lens, counts) - num_later,
            tables=[np.repeat(table, counts, axis=0) for table in self.tables],
        )

    def split_chunks(self, group: int) -> ChunkedSequences | None:
        """The sequences as the attention of a chunked group sees them; None for any other group."""
        spec = self.groups[group]
        if spec.chunk_size is None:
            return None
        return split_sequences(
            self.query_starts, self.context_lens, self.tables[group], spec.chunk_size, spec.block_size
        )

    @property
    def crosses_chunks(self) -> bool:
        """Whether any sequence has queries in several chunks of a group."""
        return any(
            spec.chunk_size is not None and count_crossings(self.query_starts, self.context_lens, spec.chunk_size) > 0
            for spec in self.groups
        )

    def to_inputs(self, to_device: Callable[[np.ndarray], Tensor], *, device_lengths: bool) -> StepInputs:
        """to_device: copies an array. device_lengths: whether kernels read the lengths on the device."""
        lengths = None
        if device_lengths:
            query_starts = to_device(self.query_starts.astype(np.int32))
            context_lens = to_device(self.context_lens.astype(np.int32))
            lengths = Lengths(query_starts, context_lens)
        return StepInputs(
            ids=to_device(self.ids),
            positions=to_device(self.positions),
            query_starts=self.query_starts.tolist(),
            context_lens=self.context_lens.tolist(),
            groups=tuple(self._to_group_inputs(group, to_device, device_lengths) for group in range(len(self.groups))),
            lengths=lengths,
        )

    def _to_group_inputs(
        self, group: int, to_device: Callable[[np.ndarray], Tensor], device_lengths: bool
    ) -> KVGroupInputs:
        slots = to_device(self.slots[group])
        split = self.split_chunks(group)
        if split is None:
            return KVGroupInputs(slots, to_device(np.ascontiguousarray(self.tables[group])))
        lengths = None
        if device_lengths:
            lengths = Lengths(
                to_device(split.query_starts.astype(np.int32)), to_device(split.context_lens.astype(np.int32))
            )
        chunks = ChunkInputs(split.query_starts.tolist(), split.context_lens.tolist(), lengths)
        return KVGroupInputs(slots, to_device(split.table), chunks)


class InputBatch:
    """All live requests of a worker. Ids and block tables are arrays, so that inputs are gathered without a loop."""

    def __init__(self, groups: Sequence[KVCacheSpec], max_num_seqs: int, max_model_len: int) -> None:
        self._groups = tuple(groups)
        self._requests: list[RequestState | None] = [None] * max_num_seqs
        self._first_positions = np.zeros(max_num_seqs, np.int64)
        self._token_ids = np.zeros((max_num_seqs, max_model_len), np.int64)
        self._num_ids = np.zeros(max_num_seqs, np.int64)
        self._tables = [np.zeros((max_num_seqs, -(-max_model_len // group.block_size)), np.int32) for group in groups]
        self._num_blocks = [np.zeros(max_num_seqs, np.int64) for _ in groups]
        self._with_prompt_logprobs: set[int] = set()  # indices of requests that want them

    def __getitem__(self, req_index: int) -> RequestState:
        request = self._requests[req_index]
        assert request is not None, f"no request has index {req_index}"
        return request

    def token_ids(self, req_index: int, end: int) -> np.ndarray:
        """The first `end` ids of a request, prompt and output, int64; a view. Unknown ids are undefined."""
        ids: np.ndarray = self._token_ids[req_index, :end]
        return ids

    def known_ids(self, req_index: int) -> np.ndarray:
        """The ids of a request that the host knows, prompt and output, int64; a view."""
        return self.token_ids(req_index, int(self._num_ids[req_index]))

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Add new requests, append new ids and blocks."""
        for new in scheduler_output.new_requests:
            index = new.req_index
            self._requests[index] = RequestState(
                new.sampling,
                new.num_prompt,
                self._token_ids[index, : new.num_prompt],
                self._token_ids[index, new.num_prompt :],
                new.prompt_logprobs,
                new.pooling,
                new.pools_tokens,
                new.second_text_start,
                new.adapter_slot,
            )
            if new.prompt_logprobs is None:
                self._with_prompt_logprobs.discard(index)
            else:
                self._with_prompt_logprobs.add(index)
            self._first_positions[index] = LONG_ROPE_OFFSET if new.uses_long_rope else 0
            self._token_ids[index, : len(new.token_ids)] = new.token_ids
            self._num_ids[index] = len(new.token_ids)
            for num_blocks in self._num_blocks:
                num_blocks[index] = 0
        self._append_ids([chunk for chunk in scheduler_output.scheduled if chunk.new_token_ids])
        for chunk in scheduler_output.scheduled:
            index = chunk.req_index
            if chunk.draft_ids:  # overwritten by later ids of the request
                start = self._num_ids[index]
                self._token_ids[index, start : start + len(chunk.draft_ids)] = chunk.draft_ids
            if chunk.new_blocks:
                for table, num_blocks, blocks in zip(self._tables, self._num_blocks, chunk.new_blocks, strict=True):
                    start = num_blocks[index]
                    end = start + len(blocks)
                    table[index, start:end] = blocks
                    num_blocks[index] = end

    def forget_ids(self, req_index: int, num_ids: int) -> None:
        """Drop all ids of a request after the first `num_ids`, which other ids will replace."""
        self._num_ids[req_index] = num_ids

    def _append_ids(self, scheduled: Sequence[ScheduledTokens]) -> None:
        """Append the new ids of all requests at once."""
        if len(scheduled) <= FEW_SEQUENCES:
            for chunk in scheduled:
                start = int(self._num_ids[chunk.req_index])
                end = start + len(chunk.new_token_ids)
                self._token_ids[chunk.req_index, start:end] = chunk.new_token_ids
                self._num_ids[chunk.req_index] = end
            return
        indices = np.array([chunk.req_index for chunk in scheduled])
        counts = np.array([len(chunk.new_token_ids) for chunk in scheduled])
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(self._num_ids[indices] - ends + counts, counts)
        new_ids = np.fromiter(chain.from_iterable(chunk.new_token_ids for chunk in scheduled), np.int64, ends[-1])
        self._token_ids[np.repeat(indices, counts), positions] = new_ids
        self._num_ids[indices] += counts

    def wants_prompt_logprobs(self, chunk: ScheduledTokens) -> bool:
        """Whether the chunk computes prompt tokens whose log-probabilities are requested."""
        index = chunk.req_index
        return index in self._with_prompt_logprobs and chunk.start < self[index].num_prompt

    def find_token_types(self, scheduled: Sequence[ScheduledTokens]) -> Ints | None:
        """0 for tokens of the first text of a pair, 1 for those of the second, (tokens,); None without pairs."""
        starts = [self[chunk.req_index].second_text_start for chunk in scheduled]
        if all(start is None for start in starts):
            return None
        parts = []
        for chunk, start in zip(scheduled, starts, strict=True):
            positions = np.arange(chunk.start, chunk.start + chunk.count)
            parts.append((positions >= start).astype(np.int64) if start is not None else np.zeros_like(positions))
        return np.concatenate(parts)

    def gather(self, scheduled: Sequence[ScheduledTokens]) -> HostInputs:
        """The inputs of a step, in the order of `scheduled`."""
        indices = np.array([chunk.req_index for chunk in scheduled])
        counts = np.array([chunk.count for chunk in scheduled])
        context_lens = np.array([chunk.start for chunk in scheduled]) + counts
        query_starts = np.concatenate(([0], np.cumsum(counts)))
        req_indices = np.repeat(indices, counts)
        positions = np.arange(query_starts[-1]) + np.repeat(context_lens - query_starts[1:], counts)
        slots = []
        tables = []
        for group, table in zip(self._groups, self._tables, strict=True):
            blocks = table[req_indices, positions // group.block_size].astype(np.int64)
            slots.append(blocks * group.block_size + positions % group.block_size)
            tables.append(table[indices, : -(-int(context_lens.max()) // group.block_size)])
        num_ids = self._num_ids[indices] + np.array([len(chunk.draft_ids) for chunk in scheduled])
        is_known = positions < np.repeat(num_ids, counts)
        return HostInputs(
            ids=np.where(is_known, self._token_ids[req_indices, positions], LAST_SAMPLED),
            req_indices=req_indices,
            positions=positions + self._first_positions[req_indices],
            query_starts=query_starts,
            context_lens=context_lens,
            groups=self._groups,
            slots=slots,
            tables=tables,
            all_known=bool(is_known.all()),
        )


class LastTokenIds:
    """The id sampled last for each request, on the device: the next step reads it there before the host has it."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def fill(self, ids: Tensor, req_indices: Tensor) -> Tensor:
        """ids: (tokens,), with negative ones replaced by the last id of the token's request; req_indices: (tokens,).
        A last id that is negative (logits not finite) becomes 0; its results are discarded."""
        return torch.where(ids < 0, self._ids[req_indices].clamp(min=0), ids)

    def store(self, ids: Tensor, req_indices: Tensor) -> None:
        """Remember sampled ids, (requests,)."""
        self._ids.index_copy_(0, req_indices, ids)
