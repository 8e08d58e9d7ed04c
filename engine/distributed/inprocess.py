"""One rank inside the engine's process: steps are calls, not messages."""

from __future__ import annotations

from concurrent.futures import Future

from serve_llm.common.hosts import host_id
from serve_llm.common.types import EPLBStats
from serve_llm.engine.config import Config
from serve_llm.engine.distributed.executor import Executor, ExecutorBuilder, StepResult
from serve_llm.engine.distributed.expert_groups import ExpertParallelGroups
from serve_llm.engine.distributed.messages import LOOPBACK, CacheReady, ExpertGroupSetup, LoadDone
from serve_llm.engine.distributed.process_groups import build_expert_group
from serve_llm.engine.model.shard import Shard, build_rank_shard
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.transformers_spec import TransformersSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.scheduler.output import MaskSource, SchedulerOutput
from serve_llm.engine.worker.kv_cache import KVCacheConfig
from serve_llm.engine.worker.pending_step import PendingStep
from serve_llm.engine.worker.worker import Worker


class InProcessExecutorBuilder(ExecutorBuilder):
    """See `ExecutorBuilder`: for the one rank in this process."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec | TransformersSpec,
        weights: WeightMap | None,
        expert_groups: ExpertParallelGroups | None,
    ) -> None:
        """expert_groups: set if data-parallel engines share the experts."""
        self._config = config
        self._spec = spec
        self._weights = weights
        self._expert_groups = expert_groups
        self._worker: Worker | None = None

    def load(self) -> list[LoadDone]:
        config = self._config
        setup: ExpertGroupSetup | None = None
        address = ""
        if self._expert_groups is not None:
            (setup,) = self._expert_groups.join([host_id()])
            address = self._expert_groups.address
        experts, wait_for_engines = build_expert_group(setup, config, 0, address or LOOPBACK)

        def wait_for_all(value: bool) -> bool:
            wait_for_engines()
            return value

        groups = ProcessGroups(local_ranks=config.engines_on_host(0), experts=experts, wait_for_all=wait_for_all)
        if isinstance(self._spec, TransformersSpec):
            shard = Shard(ParallelLayout(), 0, self._spec.layers)
        else:
            shard = build_rank_shard(self._spec, config, 0)
        self._worker = Worker(config, self._spec, self._weights, shard, groups)
        worker = self._worker
        return [LoadDone(worker.num_blocks, worker.weight_bytes, worker.threads, worker.num_slots)]

    def allocate_cache(self, num_blocks: int, num_slots: int) -> list[CacheReady]:
        assert self._worker is not None, "load first"
        kv_cache_config = self._worker.allocate(num_blocks, num_slots)
        return [CacheReady(kv_cache_config, self._worker.host_memory)]

    def build_executor(self, kv_cache_config: KVCacheConfig) -> InProcessExecutor:
        assert self._worker is not None, "load first"
        return InProcessExecutor(self._config, self._worker, kv_cache_config, self._expert_groups)

    def close(self, error: BaseException | None = None) -> None:
        """Nothing outlives the process."""


class LocalStepFuture(Future[StepResult]):
    """A step that has been started; `result` waits for it in the calling thread."""

    def __init__(self, started: PendingStep) -> None:
        super().__init__()
        self._started = started

    def result(self, timeout: float | None = None) -> StepResult:
        if not self.done():
            try:
                self.set_result(self._started.finish())
            except Exception as error:
                self.set_exception(error)
        return super().result(timeout)


class InProcessExecutor(Executor):
    """Runs steps on one worker in this process."""

    def __init__(
        self, config: Config, worker: Worker, kv_cache_config: KVCacheConfig, shared_memory: object = None
    ) -> None:
        """shared_memory: kept alive for other engines."""
        self.depth = 2 if config.async_scheduling else 1
        self.kv_cache_config = kv_cache_config
        self._worker = worker
        self._shared_memory = shared_memory

    @property
    def eplb_stats(self) -> EPLBStats | None:
        return self._worker.eplb_stats

    def execute(self, scheduler_output: SchedulerOutput, masks: MaskSource | None = None) -> Future[StepResult]:
        try:
            return LocalStepFuture(self._worker.start(scheduler_output, masks))
        except Exception as error:
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed

    def check(self) -> None:
        """Nothing happens between steps."""

    def close(self) -> None:
        """Nothing outlives the process."""
