"""What the engine loop needs of a set of workers, and the executor of engines that step together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from serve_llm.engine.distributed.messages import CacheReady, LoadDone
from serve_llm.engine.parallel.dp_sync import DPStepSync
from serve_llm.engine.scheduler.output import MaskSource, RunnerOutput, SchedulerOutput
from serve_llm.engine.worker.kv_cache import CacheLayout, HostMemory

StepResult = Sequence[RunnerOutput]


class Executor(Protocol):
    """Runs steps on all ranks, in order. Each result is a future, so that several steps can be in flight."""

    depth: int  # most steps in flight
    layout: CacheLayout  # agreed over all ranks
    hosts: Sequence[str] = ()  # name of each rank's host
    host_memory: Sequence[HostMemory] = ()  # where ranks that hold KV have slots, if blocks are offloaded

    def execute(self, scheduler_output: SchedulerOutput, masks: MaskSource | None = None) -> Future[StepResult]:
        """Start a step. The future holds one RunnerOutput per ScheduledTokens, or the worker's exception. masks: set if
        the step has masked chunks; called once the step has started, so that it is computed meanwhile."""

    def must_step(self) -> bool:
        """Whether to run a step even if nothing is scheduled, because other engines wait for it."""
        return False

    def check(self) -> None:
        """Raise what a worker has failed with since the last call, also between steps."""

    def drain(self) -> None:
        """Run the steps that other engines still need. Call once this engine has no more work."""
        return

    def close(self) -> None:
        """End the workers. Idempotent."""


class Workers(Protocol):
    """The workers of one engine while it starts. They have joined their process groups."""

    def load(self) -> list[LoadDone]:
        """Load the weights on all ranks. Raises what a rank failed with."""

    def allocate_cache(self, num_blocks: int, num_slots: int) -> list[CacheReady]:
        """Allocate the KV cache on all ranks, and slots of host memory."""

    def build_executor(self, layout: CacheLayout) -> Executor:
        """The executor, which owns the workers from now on. layout: that of the rank with the largest blocks."""

    def close(self, error: BaseException | None = None) -> None:
        """End the workers if there will be no executor. error: why."""


class SyncedExecutor(Executor):
    """Runs each step together with other engines that hold some of the experts of this one."""

    def __init__(self, executor: Executor, sync: DPStepSync) -> None:
        self.executor = executor
        self.sync = sync
        self.depth = executor.depth
        self.layout = executor.layout
        self.hosts = executor.hosts
        self.host_memory = executor.host_memory

    def execute(self, scheduler_output: SchedulerOutput, masks: MaskSource | None = None) -> Future[StepResult]:
        self.sync.enter()
        return self.executor.execute(scheduler_output, masks)

    def must_step(self) -> bool:
        return self.sync.is_behind()

    def check(self) -> None:
        self.executor.check()

    def drain(self) -> None:
        self.sync.leave()
        while self.sync.follow():
            self.execute(SchedulerOutput([], [])).result()

    def close(self) -> None:
        self.executor.close()
