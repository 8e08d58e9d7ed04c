"""One rank inside the engine's process: a call, not a message."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from serve_llm.engine.config import Config
from serve_llm.engine.execute.control import Column
from serve_llm.engine.execute.executor import StepResult
from serve_llm.engine.execute.neighbours import exchange_of
from serve_llm.engine.execute.runner import Started
from serve_llm.engine.execute.threads import announce
from serve_llm.engine.execute.worker import Worker
from serve_llm.engine.model.shard import Shard, own_shard
from serve_llm.engine.model.spec import ModelSpec, PretrainedSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.parallel.comm import Alone, Neighbours
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.schedule.batch import Batch


class Answer(Future[StepResult]):
    """A step that has been begun; `result` waits for it in the calling thread."""

    def __init__(self, started: Started) -> None:
        super().__init__()
        self._started = started

    def result(self, timeout: float | None = None) -> StepResult:
        if not self.done():
            try:
                self.set_result(self._started.finish())
            except Exception as error:
                self.set_exception(error)
        return super().result(timeout)


class InProcessExecutor:
    """See `Executor`."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec | PretrainedSpec,
        weights: WeightMap | None,
        column_of: Callable[[int], Column] | None = None,
    ) -> None:
        """column_of: `Columns.of`, where engines share out experts."""
        self._column_of = column_of  # keeps in being what others reach
        experts = exchange_of(column_of(0), config, 0) if column_of is not None else Alone()
        others = Neighbours(local_ranks=config.data_parallel_size, experts=experts)
        shard = Shard(Grid(), 0, spec.layers) if isinstance(spec, PretrainedSpec) else own_shard(spec, config, 0)
        self._worker = Worker(config, spec, weights, shard, others)
        if config.device == "cpu":
            announce([self._worker.threads])
        self.depth = 2 if config.async_scheduling else 1
        self.layout = self._worker.allocate(self._worker.num_blocks)

    def execute(self, batch: Batch) -> Future[StepResult]:
        try:
            return Answer(self._worker.start(batch))
        except Exception as error:
            failed: Future[StepResult] = Future()
            failed.set_exception(error)
            return failed

    def check(self) -> None:
        """Nothing happens between steps."""

    def close(self) -> None:
        """Nothing outlives the process."""
