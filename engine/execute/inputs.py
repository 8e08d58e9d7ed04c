"""The permanent rows of one worker, and a step's inputs gathered from them.

A row mirrors a live request: its ids, sampling and block tables. Only `apply` changes it, before a step; the
inputs of a step are fresh copies, so nothing that a step reads is edited. The newest id of a row may be known to the
device alone, when a step begins before the last one's result has come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from serve_llm.engine.model.inputs import TURNED, GroupInputs, StepInputs
from serve_llm.engine.schedule.batch import Batch, Chunk
from serve_llm.engine.schedule.sequence import GroupLayout
from serve_llm.engine.types import Sampling
from serve_llm.kernels.attention import Lengths

SAMPLED_LAST = -1  # in place of an id: the one that was sampled last for the token's row

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """What a worker knows of one live request besides ids and tables."""

    sampling: Sampling
    num_prompt: int
    prompt_logprobs: int | None


@dataclass(frozen=True)
class StepArrays:
    """One step's inputs on the host; `StepInputs` says what is what. Copies, which no later `apply` edits."""

    ids: Ints  # SAMPLED_LAST for a token that only the device knows yet
    rows: Ints  # (tokens,), of each token
    positions: Ints
    query_starts: Ints
    context_lens: Ints
    slots: Sequence[Ints]  # of each group
    tables: Sequence[np.ndarray]  # of each group
    all_known: bool

    def inputs(self, put: Callable[[np.ndarray], Tensor], *, lengths: bool) -> StepInputs:
        """put: copies an array to the device. lengths: whether kernels read lengths there."""
        there = None
        if lengths:
            there = Lengths(put(self.query_starts.astype(np.int32)), put(self.context_lens.astype(np.int32)))
        return StepInputs(
            ids=put(self.ids),
            positions=put(self.positions),
            query_starts=self.query_starts.tolist(),
            context_lens=self.context_lens.tolist(),
            groups=tuple(
                GroupInputs(slots=put(slots), block_table=put(np.ascontiguousarray(table)))
                for slots, table in zip(self.slots, self.tables, strict=True)
            ),
            lengths=there,
        )


class Rows:
    """All rows of a worker. Ids and tables lie in arrays, so that a step's inputs are gathered without a loop."""

    def __init__(self, groups: Sequence[GroupLayout], max_num_seqs: int, max_model_len: int) -> None:
        self._groups = tuple(groups)
        self._first_positions = np.zeros(max_num_seqs, np.int64)
        self._rows: list[Row | None] = [None] * max_num_seqs
        self._ids = np.zeros((max_num_seqs, max_model_len), np.int64)
        self._num_ids = np.zeros(max_num_seqs, np.int64)
        self._tables = [np.zeros((max_num_seqs, -(-max_model_len // g.block_size)), np.int32) for g in groups]
        self._num_blocks = [np.zeros(max_num_seqs, np.int64) for _ in groups]

    def __getitem__(self, row: int) -> Row:
        found = self._rows[row]
        assert found is not None, f"row {row} is empty"
        return found

    def ids(self, row: int, end: int | None = None) -> np.ndarray:
        """The first `end` ids of a row, prompt and output, int64, or all that are known; a view. Those that are not
        known yet are any number."""
        ids: np.ndarray = self._ids[row, : self._num_ids[row] if end is None else end]
        return ids

    def apply(self, batch: Batch) -> None:
        """Fill new rows, append new ids and blocks."""
        for new in batch.new_rows:
            self._rows[new.row] = Row(new.sampling, new.num_prompt, new.prompt_logprobs)
            self._ids[new.row, : len(new.ids)] = new.ids
            self._num_ids[new.row] = len(new.ids)
            self._first_positions[new.row] = TURNED if new.is_turned else 0
            for counts in self._num_blocks:
                counts[new.row] = 0
        for chunk in batch.chunks:
            if chunk.new_ids:
                start = self._num_ids[chunk.row]
                self._ids[chunk.row, start : start + len(chunk.new_ids)] = chunk.new_ids
                self._num_ids[chunk.row] = start + len(chunk.new_ids)
            for table, counts, blocks in zip(self._tables, self._num_blocks, chunk.new_blocks, strict=True):
                if blocks:
                    start = counts[chunk.row]
                    table[chunk.row, start : start + len(blocks)] = blocks
                    counts[chunk.row] = start + len(blocks)

    def gather(self, chunks: Sequence[Chunk]) -> StepArrays:
        """What the chunks need, in their order."""
        rows = np.array([chunk.row for chunk in chunks])
        counts = np.array([chunk.count for chunk in chunks])
        ends = np.array([chunk.start for chunk in chunks]) + counts
        query_starts = np.concatenate(([0], np.cumsum(counts)))
        token_rows = np.repeat(rows, counts)
        positions = np.arange(query_starts[-1]) + np.repeat(ends - query_starts[1:], counts)
        slots, tables = [], []
        for layout, table in zip(self._groups, self._tables, strict=True):
            blocks = table[token_rows, positions // layout.block_size].astype(np.int64)
            slots.append(blocks * layout.block_size + positions % layout.block_size)
            tables.append(table[rows, : -(-int(ends.max()) // layout.block_size)])
        is_known = positions < self._num_ids[token_rows]
        return StepArrays(
            ids=np.where(is_known, self._ids[token_rows, positions], SAMPLED_LAST),
            rows=token_rows,
            positions=positions + self._first_positions[token_rows],
            query_starts=query_starts,
            context_lens=ends,
            slots=slots,
            tables=tables,
            all_known=bool(is_known.all()),
        )
