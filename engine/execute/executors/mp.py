"""Ranks as processes of this host: steps, tensors and answers go through shared memory. No torch."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future

import msgspec

from serve_llm.engine.config import Config
from serve_llm.engine.errors import EngineError
from serve_llm.engine.execute import control
from serve_llm.engine.execute.executor import StepResult
from serve_llm.engine.execute.launch import LocalRanks
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.execute.roster import Roster
from serve_llm.engine.execute.steps import STEP_SECONDS
from serve_llm.engine.execute.wiring import HostWiring
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.parallel.shm import Closed
from serve_llm.engine.schedule.batch import Batch, ChunkResult

START_SECONDS = 300.0  # for a process to start and import torch, on a busy machine
LOAD_SECONDS = 3600.0  # for weights, which may come over a slow network

logger = logging.getLogger(__name__)


def start_ranks(size: int) -> Roster:
    """Start the processes; they import what they need while the caller does the same."""
    return Roster(size, lambda address: LocalRanks(range(size), address))


class Answer(Future[StepResult]):
    """A step under way. `result` takes answers from the channel in the calling thread: no other one has to wake it."""

    def __init__(self, executor: MpExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> StepResult:
        self._executor.collect(self)
        return super().result(timeout)


class MpExecutor:
    """See `Executor`. To be used in one thread."""

    def __init__(self, config: Config, spec: ModelSpec, model: Mapping[str, object], roster: Roster) -> None:
        """model: config.json, which `spec` was read from. roster: from `start_ranks`; ends with this.

        Returns when all ranks have loaded their weights and allocated their cache. Raises what a rank failed with, in
        a message that names it.
        """
        self._grid = Grid(config.tensor_parallel_size, config.pipeline_parallel_size)
        self.depth = self._grid.pipeline
        self._roster = roster
        step_bytes = config.max_num_batched_tokens * spec.width * config.element_bytes
        self._wiring = HostWiring(self._grid, range(self._grid.size), step_bytes)
        self._steps = self._wiring.channel()
        self._under_way: deque[Answer] = deque()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[ChunkResult]).decode
        try:
            self.layout = self._start(config, json.dumps(model))
        except BaseException:
            self.close()
            raise
        roster.watch(self._wiring.close)

    def _start(self, config: Config, model: str) -> CacheLayout:
        roster, size = self._roster, self._grid.size
        count = f"{size} rank{'s' if size > 1 else ''}"
        check_versions(roster.gather(control.Hello, START_SECONDS))
        level = logging.getLevelName(max(logger.getEffectiveLevel(), logging.DEBUG)).lower()
        local_ranks = size * config.data_parallel_size
        for rank in range(size):
            # What all ranks would say is said once, here.
            level_there = "warning" if level == "info" else level
            rings = self._wiring.rings(rank)
            roster.send(rank, control.Begin(config, model, local_ranks, rank, level_there, rings))
        roster.gather(control.Joined, START_SECONDS)
        logger.info("%s up in %.2f s", count, time.perf_counter() - roster.began)
        began = time.perf_counter()
        loaded = roster.gather(control.Loaded, LOAD_SECONDS)
        logger.info("Weights loaded and packed by %s in %.2f s", count, time.perf_counter() - began)
        num_blocks = min(said.num_blocks for said in loaded)
        for rank in range(size):
            roster.send(rank, control.Allocate(num_blocks))
        layouts = [ready.layout for ready in roster.gather(control.Ready, START_SECONDS)]
        return max(layouts, key=lambda layout: layout.block_bytes)

    def execute(self, batch: Batch) -> Future[StepResult]:
        answer = Answer(self)
        try:
            self._steps.send(self._encode(batch))
            self._under_way.append(answer)
        except (Closed, TimeoutError) as error:
            answer.set_exception(self._cause(error))
        return answer

    def collect(self, wanted: Answer) -> None:
        """Take answers, which come in the order of the steps, up to this one's."""
        while not wanted.done():
            oldest = self._under_way.popleft()
            try:
                oldest.set_result(self._decode(self._steps.receive()))
            except (Closed, TimeoutError) as error:
                oldest.set_exception(self._cause(error))

    def _cause(self, error: Exception) -> Exception:
        if isinstance(error, TimeoutError):
            self._roster.fail(self._roster.silence(STEP_SECONDS))
            self._wiring.close()
        return self._roster.cause()

    def check(self) -> None:
        if self._roster.failure is not None:
            raise self._roster.failure

    def close(self) -> None:
        self._wiring.close()
        self._roster.close()


def check_versions(hellos: list[control.Hello]) -> None:
    """Raises EngineError that names what differs from here."""
    here = control.versions()
    for hello in hellos:
        for what, version in here.items():
            if hello.versions.get(what) != version:
                raise EngineError(
                    f"rank {hello.rank} (host {hello.host}) has {what} {hello.versions.get(what)}, but the engine has "
                    f"{version}: install the same on all hosts"
                )
