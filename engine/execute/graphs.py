"""Decode steps of a GPU as captured graphs: one launch in place of hundreds, for a ladder of batch sizes.

A step in which every sequence computes one token takes the graph of the next larger size. The rows that are left over
stand for nothing: their slots are -1, so nothing is written, and their contexts empty, so nothing is read. What the
graph reads lies in buffers that are filled before each replay. A size is computed eagerly when it is met first, which
compiles its kernels as well, and captured when it is met again: nothing is captured that nobody needs, and a start
does not wait for it.

Knows no CUDA: who captures, and how, comes from outside.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from serve_llm.engine.execute.inputs import StepArrays
from serve_llm.engine.execute.transfer import Transfer
from serve_llm.engine.model.inputs import GroupInputs, StepInputs
from serve_llm.engine.schedule.sequence import GroupLayout
from serve_llm.kernels.attention import Lengths

# Of a step and its tokens' rows, (tokens,) int64: logits of all tokens.
Compute = Callable[[StepInputs, Tensor], Tensor]


class Captured(NamedTuple):
    replay: Callable[[], None]
    output: Tensor  # where each replay leaves its result


Capture = Callable[[Callable[[], Tensor]], Captured]


def ladder(most: int) -> list[int]:
    """Sizes up to `most`, ascending: powers of two, from 16 on in steps of 16, from 256 on of 64. So at most a few rows
    in a hundred are left over where it counts."""
    sizes = {1, 2, 4, 8, *range(16, 256, 16), *range(256, most + 1, 64), most}
    return sorted(size for size in sizes if size <= most)


class DecodeGraphs:
    def __init__(
        self,
        compute: Compute,
        capture: Capture,
        transfer: Transfer,
        groups: Sequence[GroupLayout],
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """compute: reads nothing of a step on the host but upper bounds of lengths."""
        self._compute, self._capture, self._transfer = compute, capture, transfer
        self._max_model_len = max_model_len
        self._sizes = ladder(max_num_seqs)
        self._tables = [
            torch.zeros((max_num_seqs, -(-max_model_len // g.block_size)), dtype=torch.int32, device=transfer.device)
            for g in groups
        ]
        self._buffers: dict[int, _Buffers] = {}
        self._graphs: dict[int, Captured] = {}
        self._output: Tensor | None = None

    def logits(self, step: StepArrays) -> Tensor:
        """Of each sequence's one token: (sequences, columns). The next call may overwrite them."""
        count = len(step.ids)
        size = self._sizes[bisect_left(self._sizes, count)]
        is_new = size not in self._buffers
        if is_new:
            self._buffers[size] = _Buffers(size, self._tables, self._max_model_len)
        buffers = self._buffers[size]
        buffers.fill(step, self._transfer)
        if is_new:
            logits = self._compute(buffers.inputs, buffers.rows)
            if self._output is None:
                self._output = logits.new_empty((self._sizes[-1], logits.shape[1]))
            return logits[:count]
        if size not in self._graphs:
            assert self._output is not None
            output = self._output[:size]  # one for all sizes: logits of many rows are large
            self._graphs[size] = self._capture(lambda: output.copy_(self._compute(buffers.inputs, buffers.rows)))
        captured = self._graphs[size]
        captured.replay()
        return captured.output[:count]


class _Buffers:
    """The inputs of one size of step."""

    def __init__(self, size: int, tables: Sequence[Tensor], max_model_len: int) -> None:
        """tables: of the largest size, which all sizes share."""
        device = tables[0].device
        self._tables = [table[:size] for table in tables]
        self._numbers = torch.empty((3 + len(tables), size), dtype=torch.int64, device=device)
        self._lengths = Lengths(
            torch.arange(size + 1, dtype=torch.int32, device=device),
            torch.empty(size, dtype=torch.int32, device=device),
        )
        ids, self.rows, positions, *slots = self._numbers
        self.inputs = StepInputs(
            ids=ids,
            positions=positions,
            query_starts=list(range(size + 1)),
            context_lens=[max_model_len] * size,  # the most that it may be
            groups=tuple(GroupInputs(*pair) for pair in zip(slots, self._tables, strict=True)),
            lengths=self._lengths,
        )

    def fill(self, step: StepArrays, transfer: Transfer) -> None:
        count, size = len(step.ids), self._numbers.shape[1]
        numbers = np.zeros(self._numbers.shape, np.int64)
        numbers[3:] = -1  # slots
        for row, values in zip(numbers, (step.ids, step.rows, step.positions, *step.slots), strict=True):
            row[:count] = values
        contexts = np.zeros(size, np.int32)
        contexts[:count] = step.context_lens
        transfer.fill(self._numbers, numbers)
        transfer.fill(self._lengths.context_lens, contexts)
        for buffer, table in zip(self._tables, step.tables, strict=True):
            transfer.fill(buffer[:count, : table.shape[1]], table)


class CudaCapture:
    """See `Capture`. All graphs draw from one pool of memory, since no two run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _without_collector():
            # Other threads, NCCL's watchdog for one, may do what would end a capture of the whole process.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = compute()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # that a capture has failed, and not why
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return Captured(graph.replay, output)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """A graph of an engine that is gone, destroyed by Python's collector, would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
