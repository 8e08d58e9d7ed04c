"""What one engine step computes: the message from the scheduler to every worker, and the answer. A leaf.

A live request owns one row from its admission until it ends or is preempted. The first batch that holds a row carries a
NewRow with everything about it; later ones only say how far to compute, and which ids and blocks were added. Sampled
ids reach all workers this way, also the one that sampled them.
"""

from __future__ import annotations

import msgspec

from serve_llm.engine.types import Sampling, TokenLogprobs


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """A row is (re)filled: whatever it held before is gone."""

    row: int
    ids: list[int]  # prompt and output so far
    num_prompt: int  # the first so many of ids are the prompt
    sampling: Sampling
    prompt_logprobs: int | None  # None also when they were delivered before a preemption
    is_turned: bool = False  # as of `Sequence`


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Compute positions start .. start + count - 1 of a row."""

    row: int
    start: int
    count: int
    new_blocks: list[list[int]]  # per KV group: block ids appended to the row's table
    sample: bool  # the last position is the row's last known token: sample the next one
    new_ids: list[int]  # appended to the row's ids: sampled since its last chunk


class Batch(msgspec.Struct, frozen=True, array_like=True):
    new_rows: list[NewRow]
    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


class ChunkResult(msgspec.Struct, array_like=True):
    """What one chunk of a batch brought, in the order of the batch's chunks."""

    token_id: int | None = None  # set if the chunk asked for a sample
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # for positions start+1 .. of the prompt, if asked for
    error: str | None = None  # set instead of a sample that could not be drawn; the request ends with it
