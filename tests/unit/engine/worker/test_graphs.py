"""The ladder of captured decode steps: sizes, what is captured when, and the content of padding rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.transfer import DeviceCopier
from serve_llm.engine.worker.graph_sizes import MIXED_TOKENS, list_decode_sizes, list_mixed_sequences
from serve_llm.engine.worker.graphs import CapturedGraph, GraphRunner, InputBufferLayout
from serve_llm.engine.worker.input_batch import HostInputs

GROUPS = (KVCacheSpec(4, None), KVCacheSpec(8, 6))


@given(st.integers(1, 3000))
def test_the_ladder_reaches_from_one_to_the_most(most: int) -> None:
    sizes = list_decode_sizes(most)
    assert sizes[0] == 1 and sizes[-1] == most and sizes == sorted(set(sizes))
    assert all(above <= max(2 * below, below + 64) for below, above in itertools.pairwise(sizes))
    assert len(sizes) <= 20 + most // 64


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 5), st.integers(1, 40))
def test_packed_numbers_lie_apart_and_where_kernels_expect_them(
    tokens: int, rows: int, groups: int, sequences: int
) -> None:
    shape = InputBufferLayout(3 + groups, tokens, rows, 2 + groups, sequences)
    packed = torch.zeros(shape.size, dtype=torch.int64)
    numbers, row_view, lengths = shape.split(packed, packed.view(torch.int32))
    parts = [*numbers, row_view, *lengths]
    assert [len(part) for part in parts] == [tokens] * (3 + groups) + [rows, sequences + 1] + [sequences] * (1 + groups)
    assert all((part.data_ptr() - packed.data_ptr()) % 16 == 0 for part in parts if len(part))
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    assert all((part == number + 1).all() for number, part in enumerate(parts))


class Log:
    """A model that records its inputs, and a capture that runs the same code again."""

    def __init__(self, max_num_seqs: int = 20, is_last: bool = True) -> None:
        self.computed: list[StepInputs] = []
        self.req_indices: list[list[int]] = []
        self.rows: list[list[int] | None] = []
        self.captured: list[int] = []
        self.places: list[int] = []  # captured positions
        self.replayed = 0
        self.graphs = GraphRunner(
            self.compute,
            self.capture,
            DeviceCopier(torch.device("cpu")),
            GROUPS,
            max_num_seqs,
            max_model_len=40,
            is_last=is_last,
        )

    def compute(self, inputs: StepInputs, req_indices: Tensor, rows: Tensor | None, received: Tensor | None) -> Tensor:
        self.computed.append(inputs)
        self.req_indices.append(req_indices.tolist())
        self.rows.append(None if rows is None else rows.tolist())
        hidden = (inputs.ids * 10 + inputs.positions).float().unsqueeze(1)
        if received is not None:
            hidden = hidden + received
        return hidden if rows is None else hidden[rows]

    def capture(self, compute: Callable[[], Tensor]) -> CapturedGraph:
        made = compute()
        self.places.append(made.data_ptr())
        output = torch.zeros_like(made)
        self.captured.append(len(output))

        def replay() -> None:
            self.replayed += 1
            output.copy_(compute())

        return CapturedGraph(replay, output)


def step(count: int, first_id: int = 0) -> HostInputs:
    numbers = np.arange(first_id, first_id + count)
    return HostInputs(
        ids=numbers,
        req_indices=numbers[::-1].copy(),
        positions=numbers + 3,
        query_starts=np.arange(count + 1),
        context_lens=numbers + 4,
        groups=GROUPS,
        slots=[numbers + 100, numbers + 200],
        tables=[np.tile(numbers[:, None].astype(np.int32), (1, width)) for width in (3, 2)],
        all_known=True,
    )


def expected(count: int, first_id: int = 0) -> list[float]:
    return [float((first_id + n) * 10 + first_id + n + 3) for n in range(count)]


def test_a_size_is_eager_once_then_captured_then_replayed() -> None:
    log = Log()
    for number, count in enumerate((3, 4, 3, 3), start=1):
        found = log.graphs.logits(step(count, first_id=number))
        assert found.flatten().tolist() == expected(count, first_id=number), "of this step, not of the one captured"
    assert log.captured == [4] and log.replayed == 3, "3 and 4 sequences take the same graph"
    log.graphs.logits(step(1))
    assert log.captured == [4], "a size that was met once"


def test_rows_that_are_left_over_stand_for_nothing() -> None:
    log = Log()
    log.graphs.logits(step(8, first_id=1))
    log.graphs.logits(step(5, first_id=1))
    inputs = log.computed[-1]
    assert inputs.ids.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert inputs.lengths is not None
    assert inputs.lengths.context_lens.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert inputs.lengths.query_starts.tolist() == list(range(9))
    for group, first in zip(inputs.groups, (100, 200), strict=True):
        assert group.slots.tolist() == [*range(first + 1, first + 6), -1, -1, -1], "nothing is written for them"
    assert inputs.context_lens == [40] * 8, "the host knows a bound alone"
    assert log.req_indices[-1] == [5, 4, 3, 2, 1, 0, 0, 0] and log.rows[-1] is None


def test_what_a_graph_reads_stays_where_it_was_captured() -> None:
    log = Log()
    for count in (2, 2, 20, 2):
        log.graphs.logits(step(count))
    places = {tuple(tensor.data_ptr() for tensor in tensors(inputs)) for inputs in log.computed if len(inputs.ids) == 2}
    assert len(places) == 1


def tensors(inputs: StepInputs) -> list[Tensor]:
    assert inputs.lengths is not None
    groups = [tensor for group in inputs.groups for tensor in (group.slots, group.block_table)]
    return [inputs.ids, inputs.positions, inputs.lengths.query_starts, inputs.lengths.context_lens, *groups]


def test_tables_are_filled_as_far_as_the_step_goes() -> None:
    log = Log()
    log.graphs.logits(step(4, first_id=5))
    tables = [group.block_table for group in log.computed[-1].groups]
    assert [table.shape for table in tables] == [(4, 10), (4, 5)]
    assert tables[0][:, :3].tolist() == [[n] * 3 for n in range(5, 9)] and tables[1][:, :2].tolist() == [
        [n] * 2 for n in range(5, 9)
    ]


def test_more_sequences_than_there_may_be_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(IndexError):
        Log(max_num_seqs=4).graphs.logits(step(5))


def test_logits_of_all_sizes_have_one_place() -> None:
    log = Log()
    for count in (3, 3, 20, 20, 1, 1):
        log.graphs.logits(step(count))
    assert log.captured == [4, 20, 1] and len(set(log.places)) == 1


def mixed_step(counts: list[int], first_id: int = 0) -> HostInputs:
    """Build a step with prompts of these lengths."""
    arrays = step(sum(counts), first_id)
    ends = np.cumsum(counts)
    return dataclasses.replace(
        arrays,
        query_starts=np.concatenate(([0], ends)),
        context_lens=np.array(counts) + 7,
        tables=[table[: len(counts)] for table in arrays.tables],
    )


def test_a_step_with_prompts_has_graphs_of_its_own() -> None:
    log = Log()
    for number, counts in enumerate(([5, 1, 6], [1, 8], [2, 2, 2]), start=1):
        rows = [sum(counts[: index + 1]) - 1 for index in range(len(counts))]
        found = log.graphs.mixed_logits(mixed_step(counts, first_id=number), rows)
        assert found.flatten().tolist() == [expected(20, number)[row] for row in rows]
    assert log.captured == [16] and log.replayed == 2
    log.graphs.mixed_logits(mixed_step([17]), [16])
    assert log.captured == [16], "32 tokens were met once"


def test_padding_tokens_belong_to_a_sequence_without_context() -> None:
    log = Log()
    for counts in ([9, 3, 2, 1, 1], [5, 1, 4]):
        log.graphs.mixed_logits(mixed_step(counts, first_id=1), [4, 5])
    inputs = log.computed[-1]
    assert inputs.ids.tolist() == [*range(1, 11), *[0] * 6] and log.rows[-1] == [4, 5, *[0] * 14]
    assert inputs.lengths is not None
    assert inputs.lengths.query_starts.tolist() == [0, 5, 6, 10, *[16] * 14]
    assert inputs.lengths.context_lens.tolist() == [12, 8, 11, *[0] * 14]
    for group, first in zip(inputs.groups, (100, 200), strict=True):
        assert group.slots.tolist() == [*range(first + 1, first + 11), *[-1] * 6]
        assert len(group.block_table) == 17
    bounds = [end - start for start, end in itertools.pairwise(inputs.query_starts)]
    assert inputs.query_starts[-1] == 16 and 1 in bounds and max(bounds) > 1, "both kinds of sequences may come"


def test_which_steps_with_prompts_have_a_graph() -> None:
    graphs = Log(max_num_seqs=20).graphs
    even = [25] * 20
    assert graphs.can_run(mixed_step([*even, 12][1:]), 20) and graphs.can_run(mixed_step([20]), 1)
    assert not graphs.can_run(mixed_step([513]), 1)
    assert not graphs.can_run(mixed_step([1] * 21), 1) and not graphs.can_run(mixed_step([30]), 21)
    chunked = (GROUPS[0], KVCacheSpec(4, 16, chunked=True))
    crossing = dataclasses.replace(mixed_step([9]), groups=chunked)  # at positions 4 to 12
    assert graphs.can_run(crossing, 1)
    beyond = dataclasses.replace(crossing, context_lens=crossing.context_lens + 8)
    assert not graphs.can_run(beyond, 1), "two chunks are two sequences"
    assert list_mixed_sequences(256) == [16, 64, 256]
    assert list_mixed_sequences(20) == [16, 20]
    assert list_mixed_sequences(1) == [1]
    assert graphs.num_sizes == len(list_decode_sizes(20)) + 2 * len(MIXED_TOKENS)


def test_as_many_sequences_as_there_may_be_leave_room_for_padding() -> None:
    log = Log(max_num_seqs=4)
    for _ in range(2):
        found = log.graphs.mixed_logits(mixed_step([2, 1, 1, 1]), [1, 2, 3, 4])
    assert len(found) == 4 and log.captured == [4] and len(log.computed[-1].context_lens) == 5


def test_a_size_is_captured_without_requests() -> None:
    log = Log()
    log.graphs.capture_decode(4)
    log.graphs.capture_decode(4)
    assert log.captured == [4] and len(log.computed) == 2 + log.replayed
    inputs = log.computed[0]
    assert inputs.lengths is not None and inputs.lengths.context_lens.tolist() == [0] * 4
    assert all(group.slots.tolist() == [-1] * 4 for group in inputs.groups)
    assert log.graphs.logits(step(3, first_id=1)).flatten().tolist() == expected(3, first_id=1)
    assert log.captured == [4]


def test_a_stage_receives_into_a_buffer_and_returns_what_it_sends() -> None:
    log = Log(is_last=False)
    log.graphs._compute = lambda inputs, _, rows, received: (inputs.ids[:, None] + received).float()
    for number in range(3):
        received = torch.full((9, 2), float(number))
        found = log.graphs.mixed_logits(mixed_step([5, 1, 3]), [4, 5, 8], received)
        assert found.tolist() == [[float(index + number)] * 2 for index in range(9)]
        found = log.graphs.logits(step(3), received[:3])
        assert found.tolist() == [[float(index + number)] * 2 for index in range(3)]
    assert log.captured == [16, 4]
