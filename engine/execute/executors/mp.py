"""Ranks as processes, of this host or of several: steps, tensors and answers go through shared memory on the engine's
host, and over the network to ranks on others. No torch.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import msgspec

from serve_llm.engine.config import Config
from serve_llm.engine.errors import EngineError
from serve_llm.engine.execute import control
from serve_llm.engine.execute.executor import StepResult
from serve_llm.engine.execute.launch import LocalRanks
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.execute.roster import START_SECONDS, Roster
from serve_llm.engine.execute.steps import STEP_FACTOR, STEP_SECONDS, ConnectionLost
from serve_llm.engine.execute.threads import announce
from serve_llm.engine.execute.wiring import Wiring
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.parallel.hosts import difference, fingerprint, host_id
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.parallel.shm import Closed
from serve_llm.engine.schedule.batch import Batch, ChunkResult

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

    def __init__(
        self,
        config: Config,
        spec: ModelSpec,
        model: Mapping[str, object],
        roster: Roster,
        column_of: Callable[[int], control.Column] | None = None,
    ) -> None:
        """model: config.json, which `spec` was read from. roster: from `start_ranks`; ends with this. column_of:
        `Columns.of`, where engines share out experts.

        Returns when all ranks have loaded their weights and allocated their cache. Raises what a rank failed with, in
        a message that names it.
        """
        self._grid = Grid(config.tensor_parallel_size, config.pipeline_parallel_size)
        self.depth = 2 if config.async_scheduling else self._grid.pipeline
        self._roster, self._column_of = roster, column_of
        self._under_way: deque[Answer] = deque()
        self._step_timeout = config.step_timeout
        self._longest = 0.0  # seconds until an answer, the most so far
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[ChunkResult]).decode
        self._wiring: Wiring | None = None
        step_bytes = config.max_num_batched_tokens * spec.width * config.element_bytes
        try:
            hellos = roster.gather(control.Hello, roster.start_seconds)
            check_hosts(hellos, config.directory)
            self._wiring = Wiring(
                self._grid,
                [hello.host_id for hello in hellos],
                host_id(),
                step_bytes,
                roster.endpoint,
                on_gpus=config.device == "cuda",
            )
            self._steps = self._wiring.channel()
            self.layout = self._start(config, json.dumps(model), self._wiring, hellos)
        except BaseException as error:
            self._close_wiring()
            roster.close(error)
            raise
        roster.watch(self._wiring.close)

    def _start(self, config: Config, model: str, wiring: Wiring, hellos: list[control.Hello]) -> CacheLayout:
        roster, size = self._roster, self._grid.size
        count = f"{size} rank{'s' if size > 1 else ''}"
        for rank, request in (requests := wiring.requests()).items():
            roster.send(rank, request)
        wired = roster.gather(control.Wired, START_SECONDS, requests)
        wiring.take(dict(zip(requests, wired, strict=True)), [hello.address for hello in hellos])
        warn_of_spans(wiring.tensor_groups_that_span, hellos)
        level = logging.getLevelName(max(logger.getEffectiveLevel(), logging.DEBUG)).lower()
        # What all ranks would say is said once, here.
        level_there = "warning" if level == "info" else level
        engines = config.data_parallel_size
        for rank in range(size):
            here = wiring.local_ranks(rank)
            steps, rings = wiring.steps(rank), wiring.rings(rank)
            column = self._column_of(self._grid.place(rank)) if self._column_of is not None else None
            begin = control.Begin(
                config, model, len(here) * engines, here.index(rank), level_there, steps, rings, wiring.span, column
            )
            roster.send(rank, begin)
        roster.gather(control.Joined, START_SECONDS)
        wiring.connect(START_SECONDS)
        logger.info("%s up in %.2f s", count, time.perf_counter() - roster.began)
        began = time.perf_counter()
        loaded = roster.gather(control.Loaded, LOAD_SECONDS)
        logger.info("Weights loaded and packed by %s in %.2f s", count, time.perf_counter() - began)
        if config.device == "cpu":
            announce([said.threads for said in loaded])
        num_blocks = min(said.num_blocks for said in loaded)
        for rank in range(size):
            roster.send(rank, control.Allocate(num_blocks))
        layouts = [ready.layout for ready in roster.gather(control.Ready, START_SECONDS)]
        return max(layouts, key=lambda layout: layout.block_bytes)

    def execute(self, batch: Batch) -> Future[StepResult]:
        answer = Answer(self)
        try:
            self._steps.send(self._encode(batch), self._limit)
            self._under_way.append(answer)
        except (Closed, TimeoutError) as error:
            answer.set_exception(self._cause(error))
        return answer

    def collect(self, wanted: Answer) -> None:
        """Take answers, which come in the order of the steps, up to this one's."""
        while not wanted.done():
            oldest = self._under_way.popleft()
            began = time.monotonic()
            try:
                oldest.set_result(self._decode(self._steps.receive(self._limit)))
                self._longest = max(self._longest, time.monotonic() - began)
            except (Closed, TimeoutError) as error:
                oldest.set_exception(self._cause(error))

    @property
    def _limit(self) -> float:
        """Seconds without an answer after which a step has failed."""
        return self._step_timeout or max(STEP_SECONDS, STEP_FACTOR * self._longest)

    def _cause(self, error: Exception) -> Exception:
        if isinstance(error, TimeoutError):
            self._roster.fail(self._roster.silence(self._limit))
            self._close_wiring()
        cause = self._roster.cause()
        if isinstance(error, ConnectionLost) and self._roster.failure is None:  # nothing else is known to be wrong
            self._roster.fail(self._roster.lost(error.ranks))
            self._close_wiring()
        return self._roster.failure or cause

    def check(self) -> None:
        if self._roster.failure is not None:
            raise self._roster.failure

    def _close_wiring(self) -> None:
        if self._wiring is not None:
            self._wiring.close()

    def close(self) -> None:
        self._close_wiring()
        self._roster.close()


def check_hosts(hellos: list[control.Hello], directory: str) -> None:
    """Raises EngineError in one line that names the hosts which differ from this one, and in what."""
    others = {hello.host_id: hello for hello in hellos if hello.host_id != host_id()}
    if not others:
        return
    prints = [fingerprint(Path(directory)), *(hello.fingerprint for hello in others.values())]
    names = ["the engine's host", *(f"the host {hello.host} ({hello.address})" for hello in others.values())]
    if found := difference(prints, names):
        raise EngineError(f"all hosts must have the same versions and the same model files: {found}")


def warn_of_spans(groups: list[range], hellos: list[control.Hello]) -> None:
    """Says what it costs that ranks which meet in every layer are on several hosts."""
    for group in groups:
        addresses = ", ".join(dict.fromkeys(hellos[rank].address for rank in group))
        logger.warning(
            "Tensor parallelism of ranks %d to %d crosses hosts (%s): each layer waits for the network twice per step; "
            "with tensor parallelism inside hosts and --pipeline-parallel-size across them it waits once per stage",
            group[0],
            group[-1],
            addresses,
        )
