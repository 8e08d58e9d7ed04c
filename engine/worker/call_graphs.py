"""Steps of a few tokens on a CPU as recorded calls: the kernels alone, without the Python code of the layers.

They work like the CUDA graphs in `graphs.py`, but have exactly as many rows as the step has tokens, and a sequence may
have several tokens. A step with prompts, or of more tokens, takes so long that recording would save nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from serve_llm.engine.worker.graphs import BatchDescriptor, CapturedGraph, GraphRunner
from serve_llm.engine.worker.input_batch import HostInputs
from serve_llm.kernels.cpu.call_recorder import BufferPool
from serve_llm.kernels.registry import Record

MAX_TOKENS = 8  # the most that a recorded step has


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

    def _capture_step(self, descriptor: BatchDescriptor, compute: Callable[[], Tensor]) -> CapturedGraph:
        return self._capture(compute)  # the result stays in the pool, which all sizes share

    def can_run(self, step: HostInputs, num_rows: int) -> bool:
        return False
