"""Chunked attention (Llama 4) as attention over more, shorter sequences.

Positions are divided into chunks, and a query attends to its own chunk only. So the queries of one chunk are those of a
sequence that begins with the chunk, and its block table is a part of the whole sequence's:

    chunks of 32 positions, a sequence computes positions 60 .. 66     queries 60 .. 63    queries 64 .. 66
                                                            context    32 .. 63            64 .. 66

This lets kernels without support for chunks compute exactly this attention.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class ChunkedSequences(NamedTuple):
    """The sequences of a step, divided at the chunks' borders; their queries have the step's order."""

    query_starts: Ints  # (chunks + 1,)
    context_lens: Ints  # (chunks,)
    table: np.ndarray  # (chunks, blocks) int32


def count_crossings(query_starts: Ints, context_lens: Ints, chunk_size: int) -> int:
    """Count how often a sequence's queries continue in the next chunk."""
    firsts = context_lens - np.diff(query_starts)
    return int(((context_lens - 1) // chunk_size - firsts // chunk_size).sum())


def split_sequences(
    query_starts: Ints, context_lens: Ints, table: np.ndarray, chunk_size: int, block_size: int
) -> ChunkedSequences:
    """query_starts, context_lens: of a step, in which each sequence has a query. table: the group's block table.
    chunk_size: a multiple of block_size, both in tokens."""
    firsts = context_lens - np.diff(query_starts)
    first_chunks = firsts // chunk_size
    counts = (context_lens - 1) // chunk_size - first_chunks + 1
    rows = np.repeat(np.arange(len(context_lens)), counts)
    chunks = first_chunks[rows] + np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = chunks * chunk_size
    ends = np.minimum(context_lens[rows], starts + chunk_size)
    query_lens = ends - np.maximum(firsts[rows], starts)
    width = -(-int((ends - starts).max(initial=0)) // block_size)
    columns = np.minimum((starts // block_size)[:, None] + np.arange(width), max(table.shape[1] - 1, 0))
    return ChunkedSequences(np.concatenate(([0], np.cumsum(query_lens))), ends - starts, table[rows[:, None], columns])
