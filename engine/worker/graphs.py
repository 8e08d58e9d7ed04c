"""Steps on a GPU as captured graphs: one launch instead of hundreds.

A step in which every sequence computes one token uses the graph of the next larger captured size. The padding rows
have slots of -1, so nothing is written, and empty contexts, so nothing is read. A sequence that computes a few tokens
takes one row for each (`HostInputs.split`): a layer writes the keys of all rows before any row reads them. A step with
prompts, alone or with decodes, of up to MIXED_TOKENS tokens uses a graph for its numbers of tokens and sequences; an
extra sequence, without context, has the padding tokens.

A graph reads its inputs from buffers that are filled before each replay. The first step of a size runs eagerly, the
second one is captured, so only sizes that occur are captured, and start-up does not wait for them.

Each pipeline stage has its own graphs. It receives hidden states into a buffer before a replay, and sends those of the
real tokens afterwards, so neither is captured.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from serve_llm.engine.model.inputs import ChunkInputs, KVGroupInputs, StepInputs
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.transfer import DeviceCopier
from serve_llm.engine.worker.graph_sizes import MIXED_TOKENS, list_decode_sizes, list_mixed_sequences
from serve_llm.engine.worker.input_batch import HostInputs
from serve_llm.kernels.attention import Lengths

# (step, request index of each token: (tokens,) int64, rows: (rows,) int64 or None, hidden states of the previous stage
# or None) -> logits of these tokens, or of all; hidden states of all tokens on a stage before the last
Compute = Callable[[StepInputs, Tensor, Tensor | None, Tensor | None], Tensor]

Numbers = TypeVar("Numbers", Tensor, np.ndarray)


class BatchDescriptor(NamedTuple):
    """The kind of step that a graph computes, with its numbers of tokens and sequences."""

    tokens: int
    sequences: int  # without the sequence of padding tokens
    is_mixed: bool = False  # sequences may have any number of tokens
    has_adapters: bool = False  # some tokens may have an adapter


class CapturedGraph(NamedTuple):
    replay: Callable[[], None]
    output: Tensor  # each replay writes its result here


Capture = Callable[[Callable[[], Tensor]], CapturedGraph]


class GraphRunner:
    """Computes the logits of steps, with a captured graph if there is one."""

    def __init__(
        self,
        compute: Compute,
        capture: Capture,
        copier: DeviceCopier,
        groups: Sequence[KVCacheSpec],
        max_num_seqs: int,
        max_model_len: int,
        is_last: bool = True,
        has_adapters: bool = False,
    ) -> None:
        """compute: may read nothing of a step on the host except upper bounds of its lengths. is_last: this is the last
        pipeline stage, which computes logits. has_adapters: steps may have adapters."""
        self._compute = compute
        self._capture = capture
        self._copier = copier
        self._max_model_len = max_model_len
        self.decode_sizes = list_decode_sizes(max_num_seqs)
        self.mixed_sequences = list_mixed_sequences(max_num_seqs)
        self.max_tokens = max_num_seqs
        self._is_last = is_last
        self._has_adapters = has_adapters
        self._groups = tuple(groups)
        self._tables = []
        for group in groups:
            longest = max_model_len if group.chunk_size is None else min(max_model_len, group.chunk_size)
            shape = (max_num_seqs + 1, -(-longest // group.block_size))
            self._tables.append(torch.zeros(shape, dtype=torch.int32, device=copier.device))
        self._buffers: dict[BatchDescriptor, _Buffers] = {}
        self._graphs: dict[BatchDescriptor, CapturedGraph] = {}
        self._num_rows: dict[BatchDescriptor, int] = {}  # rows in the result
        self._output: Tensor | None = None  # shared by all sizes, because logits of many rows are large

    @property
    def num_sizes(self) -> int:
        """The maximum number of graphs."""
        num_sizes = len(self.decode_sizes) + len(MIXED_TOKENS) * len(self.mixed_sequences)
        return 2 * num_sizes if self._has_adapters else num_sizes

    def logits(self, step: HostInputs, received: Tensor | None = None) -> Tensor:
        """step: of at most `max_tokens` tokens. received: hidden states of the previous stage. Returns (tokens,
        columns). The next call may overwrite them."""
        count = len(step.ids)
        if len(step.context_lens) < count:
            step = step.split()
        size = self.decode_sizes[bisect_left(self.decode_sizes, count)]
        has_adapters = step.adapter_slots is not None
        return self._run(BatchDescriptor(size, size, has_adapters=has_adapters), step, None, received)[:count]

    def capture_decode(self, num_sequences: int) -> None:
        """Capture the decode step of this size, one of `decode_sizes`, unless there is a graph. Only for a model of
        one stage."""
        descriptor = BatchDescriptor(num_sequences, num_sequences)
        while descriptor not in self._graphs:
            self.run_padding(descriptor)

    def run_padding(self, descriptor: BatchDescriptor) -> None:
        """Run a step of padding. descriptor: one that is captured. Only for a model of one stage."""
        nothing = np.zeros(0, np.int64)
        step = HostInputs(
            ids=nothing,
            req_indices=nothing,
            positions=nothing,
            query_starts=np.zeros(1, np.int64),
            context_lens=nothing,
            groups=self._groups,
            slots=[nothing] * len(self._tables),
            tables=[np.zeros((0, 0), np.int32)] * len(self._tables),
            all_known=True,
        )
        self._run(descriptor, step, [] if descriptor.is_mixed else None, None)

    def can_run(self, step: HostInputs, num_rows: int) -> bool:
        """Whether `mixed_logits` can compute `num_rows` rows of the step. Queries in two chunks would be two
        sequences."""
        count = max(len(step.context_lens), num_rows)
        return len(step.ids) <= MIXED_TOKENS[-1] and count <= self.max_tokens and not step.crosses_chunks

    def mixed_logits(self, step: HostInputs, rows: Sequence[int], received: Tensor | None = None) -> Tensor:
        """Returns (rows, columns): the logits of these tokens; before the last stage (tokens, columns), hidden states.
        received: as for `logits`. The next call may overwrite them."""
        num_tokens = MIXED_TOKENS[bisect_left(MIXED_TOKENS, len(step.ids))]
        count = max(len(step.context_lens), len(rows))
        num_sequences = self.mixed_sequences[bisect_left(self.mixed_sequences, count)]
        descriptor = BatchDescriptor(
            num_tokens, num_sequences, is_mixed=True, has_adapters=step.adapter_slots is not None
        )
        result = self._run(descriptor, step, rows, received)
        return result[: len(rows) if self._is_last else len(step.ids)]

    def _run(
        self, descriptor: BatchDescriptor, step: HostInputs, rows: Sequence[int] | None, received: Tensor | None
    ) -> Tensor:
        is_new = descriptor not in self._buffers
        if is_new:
            self._buffers[descriptor] = _Buffers(
                descriptor, self._groups, self._tables, self._max_model_len, self._is_last, received
            )
        buffers = self._buffers[descriptor]
        buffers.fill(step, rows, received, self._copier)
        if is_new:
            result = self._compute(buffers.inputs, buffers.req_indices, buffers.rows, buffers.received)
            self._prepare_capture(descriptor, result)
            return result
        if descriptor not in self._graphs:
            self._graphs[descriptor] = self._capture_step(
                descriptor,
                lambda: self._compute(buffers.inputs, buffers.req_indices, buffers.rows, buffers.received),
            )
        captured = self._graphs[descriptor]
        captured.replay()
        return captured.output

    def _prepare_capture(self, descriptor: BatchDescriptor, result: Tensor) -> None:
        """Make room for the results of the step's graph. result: of the eager step."""
        if self._output is None:
            max_rows = self.max_tokens if self._is_last else max(self.max_tokens, MIXED_TOKENS[-1])
            self._output = result.new_empty((max_rows, result.shape[1]))
        self._num_rows[descriptor] = len(result)

    def _capture_step(self, descriptor: BatchDescriptor, compute: Callable[[], Tensor]) -> CapturedGraph:
        assert self._output is not None
        output = self._output[: self._num_rows[descriptor]]
        return self._capture(lambda: output.copy_(compute()))


class InputBufferLayout(NamedTuple):
    """The layout of a step's numbers in one array of int64, which is copied to the device at once. Each part begins at
    a multiple of 16 bytes, as kernels are compiled for such addresses."""

    token_rows: int  # ids, request indices, positions, the slots of each KV group, and those of adapters if there are
    tokens: int
    rows: int
    length_rows: int  # query starts, context lengths, and those of each KV group's chunks
    sequences: int

    @property
    def size(self) -> int:
        """Numbers of int64."""
        return (
            self.token_rows * _round_up(self.tokens, 2)
            + _round_up(self.rows, 2)
            + self.length_rows * _round_up(self.sequences + 1, 4) // 2
        )

    def split(self, packed: Numbers, as_int32: Numbers) -> tuple[list[Numbers], Numbers, list[Numbers]]:
        """Views: the numbers of each token, `token_rows` times (tokens,) int64; the rows of which logits are wanted,
        (rows,) int64; where the queries of each sequence start, (sequences + 1,) int32, and context lengths,
        (sequences,) int32, of the step and of each KV group's chunks. as_int32: a view of `packed`."""
        padded_tokens = _round_up(self.tokens, 2)
        end = self.token_rows * padded_tokens
        numbers = packed[:end].reshape(self.token_rows, padded_tokens)
        lengths = as_int32[2 * (end + _round_up(self.rows, 2)) :].reshape(self.length_rows, -1)
        starts, *others = lengths
        return (
            [row[: self.tokens] for row in numbers],
            packed[end : end + self.rows],
            [starts[: self.sequences + 1], *(row[: self.sequences] for row in others)],
        )


def run_eagerly(compute: Callable[[], Tensor]) -> CapturedGraph:
    """A `Capture` that does not capture but runs eagerly."""
    return CapturedGraph(lambda: None, compute())


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class _Buffers:
    """The input buffers of the steps of one `BatchDescriptor`."""

    def __init__(
        self,
        descriptor: BatchDescriptor,
        groups: Sequence[KVCacheSpec],
        tables: Sequence[Tensor],
        max_model_len: int,
        is_last: bool,
        received: Tensor | None,
    ) -> None:
        """tables: block tables of the largest size, which all graphs share. received: like what such steps receive."""
        num_tokens, num_sequences, is_mixed, has_adapters = descriptor
        device = tables[0].device
        self.received = None if received is None else received.new_zeros((num_tokens, received.shape[1]))
        num_rows = num_sequences if is_mixed and is_last else 0
        if is_mixed:
            num_sequences += 1
            # Upper bounds: some sequences have one token and some have several.
            starts = [0, 1, *[num_tokens] * (num_sequences - 1)]
        else:
            starts = list(range(num_sequences + 1))
        self._tables = [table[:num_sequences] for table in tables]
        self._layout = InputBufferLayout(
            3 + len(tables) + has_adapters, num_tokens, num_rows, 2 + len(groups), num_sequences
        )
        self._packed = torch.zeros(self._layout.size, dtype=torch.int64, device=device)
        self._host: np.ndarray | None = None  # the same memory, and that of the tables, on a CPU
        self._host_tables: list[np.ndarray] = []
        if device.type == "cpu":
            self._host = self._packed.numpy()
            self._host_tables = [table.numpy() for table in self._tables]
        numbers, rows, lengths = self._layout.split(self._packed, self._packed.view(torch.int32))
        query_starts, context_lens, *chunk_context_lens = lengths
        self.rows = rows if num_rows else None
        chunks = [
            None
            if group.chunk_size is None
            # As no sequence has queries in several chunks, the sequences' queries are those of the step.
            else ChunkInputs(
                starts, [min(group.chunk_size, max_model_len)] * num_sequences, Lengths(query_starts, chunk_lens)
            )
            for group, chunk_lens in zip(groups, chunk_context_lens, strict=True)
        ]
        ids, req_indices, positions, *slots = numbers
        adapter_slots = slots.pop() if has_adapters else None
        self.req_indices = req_indices
        self.inputs = StepInputs(
            ids=ids,
            positions=positions,
            query_starts=starts,
            context_lens=[max_model_len] * num_sequences,  # upper bounds
            groups=tuple(KVGroupInputs(*parts) for parts in zip(slots, self._tables, chunks, strict=True)),
            lengths=Lengths(query_starts, context_lens),
            adapter_slots=adapter_slots,
        )

    def fill(self, step: HostInputs, rows: Sequence[int] | None, received: Tensor | None, copier: DeviceCopier) -> None:
        if self.received is not None and received is not None:
            self.received[: len(received)] = received
        count = len(step.ids)
        num_sequences = len(step.context_lens)
        packed: np.ndarray
        if self._host is None:
            packed = np.zeros(self._layout.size, np.int64)
        else:
            packed = self._host
            packed.fill(0)
        as_int32: np.ndarray = packed.view(np.int32)
        numbers, padded_rows, lengths = self._layout.split(packed, as_int32)
        query_starts, context_lens, *chunk_context_lens = lengths
        token_numbers = [step.ids, step.req_indices, step.positions, *step.slots]
        if step.adapter_slots is not None:
            token_numbers.append(step.adapter_slots)
        for row, values in zip(numbers, token_numbers, strict=True):
            row[:count] = values
        if count < self._layout.tokens:
            for slots in numbers[3:]:
                slots[count:] = -1
        context_lens[:num_sequences] = step.context_lens
        if num_sequences < self._layout.sequences:
            query_starts[:] = np.arange(len(query_starts)) if rows is None else self._layout.tokens
        query_starts[: num_sequences + 1] = step.query_starts
        if rows is not None and self.rows is not None:
            padded_rows[: len(rows)] = rows
        for index, table in enumerate(step.tables):
            split = step.split_chunks(index)
            if split is not None:
                table = split.table
                chunk_context_lens[index][:num_sequences] = split.context_lens
            if self._host is None:
                copier.fill(self._tables[index][: len(table), : table.shape[1]], table)
            else:
                self._host_tables[index][: len(table), : table.shape[1]] = table
        if self._host is None:
            copier.fill(self._packed, packed)


class CudaCapture:
    """A `Capture` by CUDA graphs. They share a memory pool, because no two run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), _without_collector():
            # thread_local: calls by other threads, such as NCCL's watchdog, must not end the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = compute()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # reports that the capture failed, but not why
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return CapturedGraph(graph.replay, output)


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
