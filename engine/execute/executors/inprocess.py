"""One rank inside the engine's process: a call, not a message."""

from __future__ import annotations

from concurrent.futures import Future

from serve_llm.engine.config import Config
from serve_llm.engine.execute.executor import StepResult
from serve_llm.engine.execute.threads import announce
from serve_llm.engine.execute.worker import Worker
from serve_llm.engine.model.shard import Shard, shard_of
from serve_llm.engine.model.spec import ModelSpec, PretrainedSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.parallel.comm import Neighbours
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.schedule.batch import Batch


class InProcessExecutor:
    """See `Executor`. Each future is done when `execute` returns."""

    depth = 1

    def __init__(self, config: Config, spec: ModelSpec | PretrainedSpec, weights: WeightMap | None) -> None:
        others = Neighbours(local_ranks=config.data_parallel_size)
        shard = Shard(Grid(), 0, spec.layers) if isinstance(spec, PretrainedSpec) else shard_of(spec, Grid(), 0)
        self._worker = Worker(config, spec, weights, shard, others)
        if config.device == "cpu":
            announce([self._worker.threads])
        self.layout = self._worker.allocate(self._worker.num_blocks)

    def execute(self, batch: Batch) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        try:
            future.set_result(self._worker.execute(batch))
        except Exception as error:
            future.set_exception(error)
        return future

    def check(self) -> None:
        """Nothing happens between steps."""

    def close(self) -> None:
        """Nothing outlives the process."""
