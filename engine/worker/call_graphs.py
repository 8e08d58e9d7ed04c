"""Steps of a few tokens on a CPU as recorded calls: the kernels alone, without the Python code of the layers.

They work like the CUDA graphs in `graphs.py`, but have exactly as many rows as the step has tokens, and a sequence may
have several tokens. A step with prompts, or of more tokens, takes so long that recording would save nothing. Encoders
are small, so their steps of one short text are recorded too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.worker.graphs import BatchDescriptor, CapturedGraph, GraphRunner
from serve_llm.engine.worker.input_batch import HostInputs
from serve_llm.kernels.cpu.call_recorder import BufferPool
from serve_llm.kernels.registry import Record

MAX_TOKENS = 18  # the most that a recorded step has: two sequences with all of their drafts, or some sequences
MAX_TEXT_TOKENS = 64  # the most of a text of which an encoder's step is recorded

Forward = Callable[[StepInputs, Sequence[Tensor], Tensor | None], Tensor]  # `Decoder.forward`


class CallCapture:
    """A `Capture` by recorded calls."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._pool = BufferPool()

    def __call__(self, compute: Callable[[], Tensor]) -> CapturedGraph:
        with self._record(self._pool) as recorder:
            output = compute()
        return CapturedGraph(recorder.replay, self._pool.borrow(output))


class CallGraphRunner(GraphRunner):
    """Computes the logits of steps by recorded calls. See `GraphRunner`, whose `max_num_seqs` is MAX_TOKENS."""

    def logits(self, step: HostInputs, received: Tensor | None = None) -> Tensor:
        if step.crosses_chunks:  # queries in two chunks would be two sequences
            step = step.split()
        return self._run(BatchDescriptor(len(step.ids), len(step.context_lens)), step, None, received)

    def _prepare_capture(self, descriptor: BatchDescriptor, result: Tensor) -> None:
        """Nothing: the pool of the recorded calls, which all sizes share, has room for their results."""

    def _capture_step(self, descriptor: BatchDescriptor, compute: Callable[[], Tensor]) -> CapturedGraph:
        return self._capture(compute)

    def can_run(self, step: HostInputs, num_rows: int) -> bool:
        return False


class _TextStep(NamedTuple):
    captured: CapturedGraph
    inputs: StepInputs  # their memory is read


class TextRecorder:
    """`Decoder.forward` of an encoder. Texts of a few tokens that are computed alone repeat the recorded calls of an
    earlier one of their length."""

    def __init__(self, forward: Forward, capture: CallCapture) -> None:
        self._forward = forward
        self._capture = capture
        # By number of tokens, and whether all their hidden states are needed. None: one such step has run.
        self._steps: dict[tuple[int, bool], _TextStep | None] = {}

    def __call__(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None) -> Tensor:
        num_tokens = len(inputs.ids)
        if num_tokens > MAX_TEXT_TOKENS or len(inputs.context_lens) > 1 or inputs.token_types is not None:
            return self._forward(inputs, caches, rows)
        key = (num_tokens, rows is None)
        if key not in self._steps:
            self._steps[key] = None
            return self._forward(inputs, caches, rows)
        step = self._steps[key] or self._record(inputs, caches, rows)
        self._steps[key] = step
        step.inputs.ids.copy_(inputs.ids)
        step.captured.replay()
        return step.captured.output  # the next step overwrites it

    def _record(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None) -> _TextStep:
        own = replace(inputs, ids=inputs.ids.clone(), positions=inputs.positions.clone(), lengths=None)
        return _TextStep(self._capture(lambda: self._forward(own, caches, rows)), own)
