"""The input buffers of captured steps hold the step alone, however they are written and whatever they held before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.transfer import DeviceCopier
from serve_llm.engine.worker.graphs import BatchDescriptor, _Buffers
from serve_llm.engine.worker.input_batch import HostInputs

GROUPS = (KVCacheSpec(4, None), KVCacheSpec(8, 16, chunked=True))
MAX_MODEL_LEN = 64
CPU = torch.device("cpu")


def make_buffers(descriptor: BatchDescriptor, *, on_host: bool) -> _Buffers:
    """on_host: written in place, as on a CPU; otherwise by copies, as on a GPU."""
    blocks = [-(-(group.chunk_size or MAX_MODEL_LEN) // group.block_size) for group in GROUPS]
    tables = [torch.zeros((descriptor.sequences + 1, count), dtype=torch.int32) for count in blocks]
    buffers = _Buffers(descriptor, GROUPS, tables, MAX_MODEL_LEN, True, None)
    if not on_host:
        buffers._host = None
    return buffers


def make_step(rng: random.Random, descriptor: BatchDescriptor) -> HostInputs:
    """A step that fits, without queries in two chunks."""
    num_sequences = rng.randint(1, descriptor.sequences)
    counts = np.ones(num_sequences, np.int64)
    if descriptor.is_mixed:
        counts[rng.randrange(num_sequences)] = rng.randint(1, min(15, descriptor.tokens - num_sequences + 1))
    context_lens = 16 * np.array([rng.randint(1, 4) for _ in counts])
    num_tokens = int(counts.sum())
    widths = [-(-int(context_lens.max()) // group.block_size) for group in GROUPS]
    draw = np.random.default_rng(rng.randrange(2**32)).integers
    return HostInputs(
        ids=draw(0, 900, num_tokens),
        req_indices=draw(0, 9, num_tokens),
        positions=draw(0, 64, num_tokens),
        query_starts=np.concatenate(([0], np.cumsum(counts))),
        context_lens=context_lens,
        groups=GROUPS,
        slots=[draw(0, 99, num_tokens) for _ in GROUPS],
        tables=[draw(1, 99, (num_sequences, width)).astype(np.int32) for width in widths],
        all_known=True,
    )


def read_tables(buffers: _Buffers, step: HostInputs) -> list[Tensor]:
    """The parts of the block tables that the step may read."""
    splits = [step.split_chunks(group) for group in range(len(GROUPS))]
    tables = [table if split is None else split.table for table, split in zip(step.tables, splits, strict=True)]
    return [held[: len(table), : table.shape[1]].clone() for held, table in zip(buffers._tables, tables, strict=True)]


@pytest.mark.parametrize(
    "descriptor", [BatchDescriptor(8, 8), BatchDescriptor(1, 1), BatchDescriptor(32, 6, is_mixed=True)]
)
def test_both_ways_of_writing_leave_the_same_numbers(descriptor: BatchDescriptor) -> None:
    rng = random.Random(descriptor.tokens)
    copier = DeviceCopier(CPU)
    in_place = make_buffers(descriptor, on_host=True)
    copied = make_buffers(descriptor, on_host=False)
    for _ in range(60):
        step = make_step(rng, descriptor)
        rows = (step.query_starts[1:] - 1).tolist() if descriptor.is_mixed else None
        fresh = make_buffers(descriptor, on_host=True)
        for buffers in (in_place, copied, fresh):
            buffers.fill(step, rows, None, copier)
        assert torch.equal(in_place._packed, fresh._packed) and torch.equal(copied._packed, fresh._packed)
        for tables in zip(*(read_tables(one, step) for one in (in_place, copied, fresh)), strict=True):
            assert torch.equal(tables[0], tables[2]) and torch.equal(tables[1], tables[2])
        num_tokens = len(step.ids)
        assert in_place.inputs.ids[:num_tokens].tolist() == step.ids.tolist()
        assert all(group.slots[num_tokens:].eq(-1).all() for group in in_place.inputs.groups), "padding writes nothing"
