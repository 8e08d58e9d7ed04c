"""Decode steps on a GPU as captured graphs: one launch instead of hundreds, for a ladder of batch sizes.

A step in which every sequence computes one token uses the graph of the next larger size. The padding rows have slots of
-1, so nothing is written, and empty contexts, so nothing is read. A graph reads its inputs from buffers that are filled
before each replay. The first step of a size runs eagerly, which also compiles its kernels; the second one is captured.
So only sizes that occur are captured, and the start does not wait for them. A sequence that computes a few tokens takes
one row for each (`BatchArrays.split`): a layer writes the keys of all rows before any row reads them.
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

from serve_llm.engine.model.inputs import GroupInputs, StepInputs
from serve_llm.engine.scheduler.sequence import GroupLayout
from serve_llm.engine.transfer import DeviceCopier
from serve_llm.engine.worker.input_batch import BatchArrays
from serve_llm.kernels.attention import Lengths

# (step, request index of each token: (tokens,) int64) -> logits of all tokens
Compute = Callable[[StepInputs, Tensor], Tensor]


class Captured(NamedTuple):
    replay: Callable[[], None]
    output: Tensor  # each replay leaves its result here


Capture = Callable[[Callable[[], Tensor]], Captured]


def ladder(largest: int) -> list[int]:
    """Batch sizes up to `largest`, ascending: powers of two, from 16 on in steps of 16, from 256 on in steps of 64.
    Large batches thus have only a few percent of padding rows."""
    sizes = {1, 2, 4, 8, *range(16, 256, 16), *range(256, largest + 1, 64), largest}
    return sorted(size for size in sizes if size <= largest)


class DecodeGraphs:
    """Computes the logits of decode steps, by a captured graph where there is one."""

    def __init__(
        self,
        compute: Compute,
        capture: Capture,
        copier: DeviceCopier,
        groups: Sequence[GroupLayout],
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """compute: may read nothing of a step on the host except upper bounds of its lengths."""
        self._compute = compute
        self._capture = capture
        self._copier = copier
        self._max_model_len = max_model_len
        self._sizes = ladder(max_num_seqs)
        self.max_tokens = max_num_seqs
        self._tables = []
        for group in groups:
            shape = (max_num_seqs, -(-max_model_len // group.block_size))
            self._tables.append(torch.zeros(shape, dtype=torch.int32, device=copier.device))
        self._buffers: dict[int, _Buffers] = {}
        self._graphs: dict[int, Captured] = {}
        self._output: Tensor | None = None  # shared by all sizes: logits of many rows are large

    def logits(self, step: BatchArrays) -> Tensor:
        """(sequences, columns). The next call may overwrite them."""
        count = len(step.ids)
        size = self._sizes[bisect_left(self._sizes, count)]
        is_new = size not in self._buffers
        if is_new:
            self._buffers[size] = _Buffers(size, self._tables, self._max_model_len)
        buffers = self._buffers[size]
        buffers.fill(step, self._copier)
        if is_new:
            logits = self._compute(buffers.inputs, buffers.req_indices)
            if self._output is None:
                self._output = logits.new_empty((self._sizes[-1], logits.shape[1]))
            return logits[:count]
        if size not in self._graphs:
            assert self._output is not None
            output = self._output[:size]
            self._graphs[size] = self._capture(lambda: output.copy_(self._compute(buffers.inputs, buffers.req_indices)))
        captured = self._graphs[size]
        captured.replay()
        return captured.output[:count]


class _Buffers:
    """The inputs of one batch size."""

    def __init__(self, size: int, tables: Sequence[Tensor], max_model_len: int) -> None:
        """tables: block tables of the largest size, which all sizes share."""
        device = tables[0].device
        self._tables = [table[:size] for table in tables]
        self._numbers = torch.empty((3 + len(tables), size), dtype=torch.int64, device=device)
        self._lengths = Lengths(
            torch.arange(size + 1, dtype=torch.int32, device=device),
            torch.empty(size, dtype=torch.int32, device=device),
        )
        ids, req_indices, positions, *slots = self._numbers
        self.req_indices = req_indices
        self.inputs = StepInputs(
            ids=ids,
            positions=positions,
            query_starts=list(range(size + 1)),
            context_lens=[max_model_len] * size,  # upper bounds
            groups=tuple(GroupInputs(*pair) for pair in zip(slots, self._tables, strict=True)),
            lengths=self._lengths,
        )

    def fill(self, step: BatchArrays, copier: DeviceCopier) -> None:
        count = len(step.ids)
        size = self._numbers.shape[1]
        numbers = np.zeros(self._numbers.shape, np.int64)
        numbers[3:] = -1  # slots
        for row, values in zip(numbers, (step.ids, step.req_indices, step.positions, *step.slots), strict=True):
            row[:count] = values
        context_lens = np.zeros(size, np.int32)
        context_lens[:count] = step.context_lens
        copier.fill(self._numbers, numbers)
        copier.fill(self._lengths.context_lens, context_lens)
        for buffer, table in zip(self._tables, step.tables, strict=True):
            copier.fill(buffer[:count, : table.shape[1]], table)


class CudaCapture:
    """A `Capture` by CUDA graphs. All draw from one memory pool, since no two run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _without_collector():
            # thread_local: calls by other threads, such as NCCL's watchdog, must not end the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = compute()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # says that the capture failed, but not why
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return Captured(graph.replay, output)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Disable Python's garbage collector: destroying the graph of a closed engine would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
