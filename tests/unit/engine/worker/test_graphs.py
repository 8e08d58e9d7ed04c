"""The ladder of captured decode steps: sizes, what is captured when, and what rows of padding are."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.scheduler.sequence import GroupLayout
from serve_llm.engine.transfer import DeviceCopier
from serve_llm.engine.worker.graphs import Captured, DecodeGraphs, ladder
from serve_llm.engine.worker.input_batch import BatchArrays

GROUPS = (GroupLayout(4, None), GroupLayout(8, 6))


@given(st.integers(1, 3000))
def test_the_ladder_reaches_from_one_to_the_most(most: int) -> None:
    sizes = ladder(most)
    assert sizes[0] == 1 and sizes[-1] == most and sizes == sorted(set(sizes))
    assert all(above <= max(2 * below, below + 64) for below, above in itertools.pairwise(sizes))
    assert len(sizes) <= 20 + most // 64


class Log:
    """A model that notes what it is given, and a capture that runs the same code again."""

    def __init__(self, max_num_seqs: int = 20) -> None:
        self.computed: list[StepInputs] = []
        self.rows: list[list[int]] = []
        self.captured: list[int] = []
        self.places: list[int] = []  # of what is captured
        self.replayed = 0
        self.graphs = DecodeGraphs(
            self.compute, self.capture, DeviceCopier(torch.device("cpu")), GROUPS, max_num_seqs, max_model_len=40
        )

    def compute(self, inputs: StepInputs, rows: Tensor) -> Tensor:
        self.computed.append(inputs)
        self.rows.append(rows.tolist())
        return (inputs.ids * 10 + inputs.positions).float().unsqueeze(1)

    def capture(self, compute: Callable[[], Tensor]) -> Captured:
        made = compute()
        self.places.append(made.data_ptr())
        output = torch.zeros_like(made)
        self.captured.append(len(output))

        def replay() -> None:
            self.replayed += 1
            output.copy_(compute())

        return Captured(replay, output)


def step(count: int, first_id: int = 0) -> BatchArrays:
    numbers = np.arange(first_id, first_id + count)
    return BatchArrays(
        ids=numbers,
        req_indices=numbers[::-1].copy(),
        positions=numbers + 3,
        query_starts=np.arange(count + 1),
        context_lens=numbers + 4,
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
    assert log.rows[-1] == [5, 4, 3, 2, 1, 0, 0, 0]


def test_what_a_graph_reads_stays_where_it_was_captured() -> None:
    log = Log()
    for count in (2, 2, 20, 2):
        log.graphs.logits(step(count))
    places = {tuple(tensor.data_ptr() for tensor in tensors(inputs)) for inputs in log.computed if len(inputs.ids) == 2}
    assert len(places) == 1


def tensors(inputs: StepInputs) -> list[Tensor]:
    assert inputs.lengths is not None
    groups = [tensor for group in inputs.groups for tensor in (group.slots, group.block_table)]
    return [inputs.ids, inputs.positions, *inputs.lengths, *groups]


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
