"""What the loop needs of a set of workers. Implementations live in `executors/`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.schedule.batch import Batch, ChunkResult

StepResult = Sequence[ChunkResult]


class Executor(Protocol):
    """Runs batches on all ranks, in order. A step's result is a future, so that several can be under way."""

    depth: int  # batches that may be under way at a time
    layout: CacheLayout  # agreed over all ranks

    def execute(self, batch: Batch) -> Future[StepResult]:
        """Start a step; the future holds one ChunkResult per chunk, or the worker's exception."""

    def check(self) -> None:
        """Raises what a worker has failed with since, also between steps."""

    def close(self) -> None:
        """End the workers. Idempotent."""
