"""Sequences split into chunks: each query sees its own chunk up to its own position, and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.engine.worker.attention_chunks import count_crossings, split_sequences


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40)), max_size=5), st.sampled_from([(4, 4), (8, 4), (32, 8)])
)
def test_each_query_sees_its_chunk(sequences: list[tuple[int, int]], sizes: tuple[int, int]) -> None:
    """sequences: number of computed tokens and of queries of each."""
    chunk_size, block_size = sizes
    starts = np.concatenate(([0], np.cumsum([count for _, count in sequences], dtype=np.int64)))
    contexts = np.array([first + count for first, count in sequences], dtype=np.int64)
    width = -(-int(contexts.max(initial=0)) // block_size)
    table = (np.arange(len(sequences))[:, None] * 100 + np.arange(width)).astype(np.int32)
    split = split_sequences(starts, contexts, table, chunk_size, block_size)
    seen = []
    for row, (begin, end) in enumerate(itertools.pairwise(split.query_starts.tolist())):
        for query in range(begin, end):
            position = int(split.context_lens[row]) - end + query
            seen.append(
                [int(split.table[row, p // block_size]) * block_size + p % block_size for p in range(position + 1)]
            )
    expected = [
        [int(table[row, p // block_size]) * block_size + p % block_size for p in range(own - own % chunk_size, own + 1)]
        for row, (first, count) in enumerate(sequences)
        for own in range(first, first + count)
    ]
    assert seen == expected
    assert split.query_starts[-1] == starts[-1] and split.table.dtype == np.int32
    assert len(split.context_lens) == len(sequences) + count_crossings(starts, contexts, chunk_size)


def test_what_is_written_in_the_module() -> None:
    table = np.arange(5, dtype=np.int32)[None]
    split = split_sequences(np.array([0, 7]), np.array([67]), table, 32, 16)
    assert (split.query_starts.tolist(), split.context_lens.tolist()) == ([0, 4, 7], [32, 3])
    assert split.table.tolist() == [[2, 3], [4, 4]]  # only the first block of the second chunk is read
