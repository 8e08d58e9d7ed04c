"""The permanent rows of one worker, and a step's input tensors built from them.

A row mirrors a live request: its ids, sampling and block tables. Only `apply` changes it, before a step; the
tensors of a step are fresh copies, so nothing that a step reads is edited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from serve_llm.engine.model.inputs import GroupInputs, StepInputs
from serve_llm.engine.schedule.batch import Batch, Chunk
from serve_llm.engine.schedule.sequence import GroupLayout
from serve_llm.engine.types import Sampling


@dataclass(frozen=True)
class Row:
    """What a worker knows of one live request besides ids and tables."""

    sampling: Sampling
    num_prompt: int
    prompt_logprobs: int | None


class Rows:
    """All rows of a worker. Ids and tables lie in arrays, so that a step's inputs are gathered without a loop."""

    def __init__(self, groups: Sequence[GroupLayout], max_num_seqs: int, max_model_len: int) -> None:
        self._groups = tuple(groups)
        self._rows: list[Row | None] = [None] * max_num_seqs
        self._ids = np.zeros((max_num_seqs, max_model_len), np.int64)
        self._num_ids = np.zeros(max_num_seqs, np.int64)
        self._tables = [np.zeros((max_num_seqs, -(-max_model_len // g.block_size)), np.int32) for g in groups]
        self._num_blocks = [np.zeros(max_num_seqs, np.int64) for _ in groups]

    def __getitem__(self, row: int) -> Row:
        found = self._rows[row]
        assert found is not None, f"row {row} is empty"
        return found

    def ids(self, row: int) -> np.ndarray:
        """All ids of a row so far, prompt and output, (num_ids,) int64; a view."""
        ids: np.ndarray = self._ids[row, : self._num_ids[row]]
        return ids

    def apply(self, batch: Batch) -> None:
        """Fill new rows, append new ids and blocks."""
        for new in batch.new_rows:
            self._rows[new.row] = Row(new.sampling, new.num_prompt, new.prompt_logprobs)
            self._ids[new.row, : len(new.ids)] = new.ids
            self._num_ids[new.row] = len(new.ids)
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

    def build(self, chunks: Sequence[Chunk], device: torch.device) -> StepInputs:
        """Input tensors for the chunks, in their order."""
        rows = np.array([chunk.row for chunk in chunks])
        counts = np.array([chunk.count for chunk in chunks])
        ends = np.array([chunk.start for chunk in chunks]) + counts
        query_starts = np.concatenate(([0], np.cumsum(counts)))
        token_rows = np.repeat(rows, counts)
        positions = np.arange(query_starts[-1]) + np.repeat(ends - query_starts[1:], counts)
        groups = []
        for layout, table in zip(self._groups, self._tables, strict=True):
            blocks = table[token_rows, positions // layout.block_size].astype(np.int64)
            slots = blocks * layout.block_size + positions % layout.block_size
            width = -(-int(ends.max()) // layout.block_size)
            groups.append(
                GroupInputs(
                    slots=torch.from_numpy(slots).to(device),
                    block_table=torch.from_numpy(np.ascontiguousarray(table[rows, :width])).to(device),
                )
            )
        return StepInputs(
            ids=torch.from_numpy(self._ids[token_rows, positions]).to(device),
            positions=torch.from_numpy(positions).to(device),
            query_starts=query_starts.tolist(),
            context_lens=ends.tolist(),
            groups=tuple(groups),
        )
