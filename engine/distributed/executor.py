"""The interface between the engine loop and a set of workers, and the executor of engines that step together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from serve_llm.common.types import EPLBStats
from serve_llm.engine.distributed.messages import CacheReady, DraftShard, LoadDone
from serve_llm.engine.parallel.dp_sync import DPStepSync
from serve_llm.engine.scheduler.output import MaskSource, RunnerOutput, SchedulerOutput
from serve_llm.engine.worker.kv_cache import HostMemory, KVCacheConfig

StepResult = Sequence[RunnerOutput]


class Executor(Protocol):
    """Runs steps on all ranks, in order. Each result is a future, so that several steps can be in flight."""

    depth: int  # most steps in flight
    kv_cache_config: KVCacheConfig  # agreed by all ranks
    hosts: Sequence[str] = ()  # name of each rank's host
    host_memory: Sequence[HostMemory] = ()  # offload slots of the ranks that hold KV, if blocks are offloaded
    draft_shards: Sequence[DraftShard] = ()  # parts of a draft model on the ranks of the last stage

    @property
    def eplb_stats(self) -> EPLBStats | None:
        """Sum over the ranks; another object after each placement of experts. None before the first."""
        return None

    def execute(self, scheduler_output: SchedulerOutput, masks: MaskSource | None = None) -> Future[StepResult]:
        """Start a step. The future holds one RunnerOutput per ScheduledTokens, or the worker's exception. masks: set if
        the step has masked chunks; called after the step has started, so that both run concurrently."""

    def must_step(self) -> bool:
        """Whether to run a step even if nothing is scheduled, because other engines wait for it."""
        return False

    def check(self) -> None:
        """Raise the error of any worker that has failed since the last call, even between steps."""

    def drain(self) -> None:
        """Run the steps that other engines still need. Call this when the engine has no more work."""
        return

    def close(self) -> None:
        """Stop the workers. Idempotent."""


class ExecutorBuilder(Protocol):
    """Builds an executor from workers that have joined their process groups: call `load`, `allocate_cache` and
    `build_executor` in this order."""

    def load(self) -> list[LoadDone]:
        """Load the weights on all ranks. Raises the error of a rank that fails."""

    def allocate_cache(self, num_blocks: int, num_slots: int) -> list[CacheReady]:
        """Allocate the KV cache on all ranks, and slots of host memory."""

    def build_executor(self, kv_cache_config: KVCacheConfig) -> Executor:
        """Build the executor, which then owns the workers. kv_cache_config: of the rank with the largest blocks."""

    def close(self, error: BaseException | None = None) -> None:
        """Stop the workers if there will be no executor. error: the reason."""


class DPSyncExecutor(Executor):
    """Runs each step together with other engines that hold some of the experts of this one."""

    def __init__(self, executor: Executor, sync: DPStepSync) -> None:
        self.executor = executor
        self.sync = sync
        self.depth = executor.depth
        self.kv_cache_config = executor.kv_cache_config
        self.hosts = executor.hosts
        self.host_memory = executor.host_memory
        self.draft_shards = executor.draft_shards

    def execute(self, scheduler_output: SchedulerOutput, masks: MaskSource | None = None) -> Future[StepResult]:
        if not scheduler_output.is_for_draft_model:  # whose experts are not shared
            self.sync.enter()
        return self.executor.execute(scheduler_output, masks)

    @property
    def eplb_stats(self) -> EPLBStats | None:
        return self.executor.eplb_stats

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
