"""Tensor- and pipeline-parallel ranks as threads of the test's process, over groups and links in memory.

They check what a group requires of its callers: the same call, shape and dtype on every rank. If a rank fails, all
others fail at their next wait, so that no rank waits forever.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import reduce
from queue import Queue
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from serve_llm.common.types import EPLBStats
from serve_llm.engine.config import Config
from serve_llm.engine.distributed.executor import Executor
from serve_llm.engine.model.shard import Shard, build_shard
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.parallel.groups import ProcessGroups, SingleRankGroup
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.scheduler.output import MaskSource, RunnerOutput, SchedulerOutput
from serve_llm.engine.worker.worker import Worker

Result = TypeVar("Result")
TIMEOUT = 60.0  # seconds; only a missing rank takes this long
END = None  # in an inbox, this means no more batches


class Meeting:
    """Where the ranks of one group exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[str] = []  # rank 0's
        self._barrier = threading.Barrier(size, timeout=TIMEOUT)
        self._slots: list[tuple[str, Tensor]] = [("", torch.empty(0))] * size

    def exchange(self, rank: int, call: str, x: Tensor, what: object = None) -> list[Tensor]:
        """Return copies of each rank's contribution, in rank order. what: must be equal on all ranks; by default the
        shape."""
        assert x.is_contiguous() or call == "all_gather", f"{call} takes a contiguous tensor"
        self._slots[rank] = (f"{call} {what or list(x.shape)} {x.dtype}", x.clone())
        self._barrier.wait()
        calls = [name for name, _ in self._slots]
        assert len(set(calls)) == 1, f"ranks make different calls: {calls}"
        if rank == 0:
            self.calls.append(calls[0])
        found = [tensor.clone() for _, tensor in self._slots]
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class MemoryGroup:
    """See `Group`: rank `rank` of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    def all_reduce(self, x: Tensor) -> Tensor:
        found = self._meeting.exchange(self.rank, "all_reduce", x)
        x.fill_(torch.nan)  # callers must use the returned tensor
        total = found[0].float()
        for tensor in found[1:]:
            total += tensor.float()
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return self._meeting.exchange(self.rank, "all_gather", x)

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        assert len(x) == sum(rows[self.rank])
        found = self._meeting.exchange(self.rank, "all_to_all", x, rows)
        return torch.cat([part.split(list(counts))[self.rank] for part, counts in zip(found, rows, strict=True)])


class MemoryLink:
    """See `PipelineLink`."""

    def __init__(self) -> None:
        self._queue: Queue[Tensor | None] = Queue()

    def send(self, x: Tensor) -> None:
        self._queue.put(x.clone())

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        x = self._queue.get(timeout=TIMEOUT)
        assert x is not None, "another rank failed"
        assert tuple(x.shape) == shape, f"{tuple(x.shape)} was sent where {shape} is expected"
        return x

    def abort(self) -> None:
        self._queue.put(None)


class Ranks:
    """The shards and neighbours of all ranks of a grid."""

    def __init__(
        self,
        spec: ModelSpec,
        grid: ParallelLayout,
        split: tuple[float, ...] | None = None,
        layers: Sequence[int] | None = None,
        columns: Sequence[Meeting] = (),
        engine: int = 0,
        num_redundant: int = 0,
    ) -> None:
        """columns: one for each rank, shared with the same rank of the engines that share experts. engine: this
        engine's index. num_redundant: experts of a layer that are held twice."""
        self.grid, self.columns, self.engine = grid, columns, engine
        part = {"engine": engine, "engines": columns[0].size, "redundant_experts": num_redundant} if columns else {}
        self.shards = [build_shard(spec, grid, rank, split, layers, **part) for rank in range(grid.size)]
        self.meetings = [Meeting(grid.tp_size) for _ in range(grid.pp_size)]
        self._links = [[MemoryLink() for _ in range(grid.tp_size)] for _ in range(grid.pp_size - 1)]
        self.neighbours = [self._neighbours(rank) for rank in range(grid.size)]

    def _neighbours(self, rank: int) -> ProcessGroups:
        stage, place = self.grid.pp_rank(rank), self.grid.tp_rank(rank)
        return ProcessGroups(
            SingleRankGroup() if self.grid.tp_size == 1 else MemoryGroup(self.meetings[stage], place),
            previous=self._links[stage - 1][place] if stage > 0 else None,
            next=self._links[stage][place] if stage < self.grid.pp_size - 1 else None,
            local_ranks=self.grid.size,
            experts=MemoryGroup(self.columns[rank], self.engine) if self.columns else SingleRankGroup(),
        )

    def abort(self) -> None:
        for meeting in (*self.meetings, *self.columns):
            meeting.abort()
        for links in self._links:
            for link in links:
                link.abort()


def run_together(size: int, work: Callable[[int], Result], abort: Callable[[], None]) -> list[Result]:
    """Run `work(rank)` on all ranks at once. Raises the error of the rank that failed first, after `abort()` has freed
    the ranks that wait for it."""
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)
            abort()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


class ThreadExecutor(Executor):
    """See `Executor`: one thread per rank. Batches travel as bytes, as they do between processes."""

    def __init__(self, config: Config, spec: ModelSpec, weights: WeightMap, ranks: Ranks) -> None:
        self.depth = 2 if config.async_scheduling else ranks.grid.pp_size
        self.ranks = ranks
        self.workers = run_together(
            ranks.grid.size,
            lambda rank: Worker(config, spec, weights, ranks.shards[rank], ranks.neighbours[rank]),
            ranks.abort,
        )
        num_blocks = min(worker.num_blocks for worker in self.workers)
        num_slots = min(worker.num_slots for worker in self.workers)
        configs = [worker.allocate(num_blocks, num_slots) for worker in self.workers]
        self.kv_cache_config = max(configs, key=lambda one: one.block_bytes)
        self.host_memory = [worker.host_memory for worker in self.workers if worker.host_memory is not None]
        self._inboxes: list[Queue[tuple[bytes, Future[list[RunnerOutput]]] | bytes | None]] = [
            Queue() for _ in self.workers
        ]
        for shard, worker, inbox in zip(ranks.shards, self.workers, self._inboxes, strict=True):
            threading.Thread(target=_serve, args=(shard, worker, inbox, ranks), daemon=True).start()
        self.close = weakref.finalize(self, _end, self._inboxes)

    @property
    def eplb_stats(self) -> EPLBStats | None:
        stats = [worker.eplb_stats for worker in self.workers if worker.eplb_stats is not None]
        return reduce(EPLBStats.add, stats) if stats else None

    def check(self) -> None:
        """Report a failure in the next step."""

    def execute(self, scheduler_output: SchedulerOutput, masks: MaskSource | None = None) -> Future[list[RunnerOutput]]:
        future: Future[list[RunnerOutput]] = Future()
        message = msgspec.msgpack.encode(scheduler_output)
        for inbox in self._inboxes:
            inbox.put((message, future))
        if masks is not None:
            bits = masks()
            for inbox in self._inboxes:
                inbox.put(bits)
        return future


def _serve(shard: Shard, worker: Worker, inbox: Queue, ranks: Ranks) -> None:
    while (item := inbox.get()) is not END:
        message, future = item
        try:
            results = worker.start(msgspec.msgpack.decode(message, type=SchedulerOutput), inbox.get).finish()
            assert shard.is_output or results == []
            if shard.is_output:
                future.set_result(results)
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):  # another rank was the first to fail
                future.set_exception(error)
            ranks.abort()
            return


def _end(inboxes: list[Queue]) -> None:
    for inbox in inboxes:
        inbox.put(END)
