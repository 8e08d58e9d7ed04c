"""Data-parallel replicas: several engines with the same model behind one interface. A single engine is one replica.

Every request runs on one engine, which `router` chooses, and stays there while that engine lives. When an engine dies,
its requests continue on the others, or wait for its replacement; `quarantine` finds requests that kill engines.
Processes are `server.engines.supervisor`'s task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count, groupby
from typing import Protocol

import msgspec

from serve_llm.common.errors import EngineDead, ServeError
from serve_llm.common.types import ModelInfo, OffloadStats, Output, Request, Stats
from serve_llm.server.engines.quarantine import Quarantine
from serve_llm.server.engines.restarts import RestartRecord
from serve_llm.server.engines.router import Router
from serve_llm.server.engines.tracked_request import TrackedRequest
from serve_llm.server.metrics.meter import Clock, Meter
from serve_llm.server.metrics.usage import UsageMeter

Sink = Callable[[Output], None]
MAX_RESTARTS_SHOWN = 20


class EngineHandle(Protocol):
    """The part of `server.engines.client.EngineClient` that replicas use."""

    meter: Meter  # counts the engine's steps
    stats: Stats

    @property
    def ready(self) -> bool: ...

    @property
    def facts(self) -> ModelInfo: ...

    def submit_many(self, pairs: Iterable[tuple[Request, Sink]]) -> None: ...

    def abort(self, ids: Sequence[int]) -> None: ...


class Replica:
    """One of the engines: its current process, and the counters of all its processes so far."""

    def __init__(self, engine: EngineHandle) -> None:
        self.engine = engine
        self.meter = engine.meter  # the engine's later processes count in it as well
        self.is_lost = False  # the process is gone and not replaced yet
        self._past = Stats()  # counters of the previous processes

    @property
    def ready(self) -> bool:
        return self.engine.ready

    @property
    def facts(self) -> ModelInfo:
        return self.engine.facts

    @property
    def stats(self) -> Stats:
        """Gauges of the current process; counters since the server started."""
        if self.is_lost:
            return self._past
        now = self.engine.stats
        past = self._past
        return msgspec.structs.replace(
            now,
            prefix_cache_queries=past.prefix_cache_queries + now.prefix_cache_queries,
            prefix_cache_hits=past.prefix_cache_hits + now.prefix_cache_hits,
            num_preemptions=past.num_preemptions + now.num_preemptions,
            num_steps=past.num_steps + now.num_steps,
            num_drafts=past.num_drafts + now.num_drafts,
            num_draft_tokens=past.num_draft_tokens + now.num_draft_tokens,
            num_accepted_tokens=past.num_accepted_tokens + now.num_accepted_tokens,
            num_forced_tokens=past.num_forced_tokens + now.num_forced_tokens,
            offload_memory=_add_offload(past.offload_memory, now.offload_memory),
            offload_disk=_add_offload(past.offload_disk, now.offload_disk),
        )

    def mark_lost(self) -> None:
        stats = self.stats
        for tier in (stats.offload_memory, stats.offload_disk):
            if tier is not None:
                tier.num_blocks = 0
                tier.num_bytes = 0
        self._past = msgspec.structs.replace(stats, num_running=0, num_waiting=0, kv_cache_usage=0.0, step_tokens=0)
        self.is_lost = True

    def replace(self, engine: EngineHandle) -> None:
        self.engine = engine
        self.is_lost = False


def _add_offload(past: OffloadStats | None, now: OffloadStats | None) -> OffloadStats | None:
    return past if now is None else now.add(past or OffloadStats())


class Replicas:
    """Create it when all engines are ready: the router needs their cache sizes."""

    def __init__(self, engines: Sequence[EngineHandle], *, prefix_caching: bool = True) -> None:
        self.engines = tuple(map(Replica, engines))
        self.num_restarts = 0  # engine processes replaced; set by the supervisor
        self.first_cause: str | None = None  # cause of the newest restart; set by the supervisor
        self.restarts: deque[RestartRecord] = deque(maxlen=MAX_RESTARTS_SHOWN)  # the newest last
        self.usage = UsageMeter()
        self.num_finished = 0  # requests that ended with an engine's final output
        self._failure: ServeError | None = None
        self._prefix_caching = prefix_caching
        self._ids = count(1)
        self._open: dict[int, TrackedRequest] = {}  # by the id of the first submission, in order of submission
        self._quarantine = Quarantine()
        self._router: Router | None = None  # a single engine needs none
        if len(self.engines) > 1:
            capacities = [self._cache_blocks(replica) for replica in self.engines]
            self._router = Router(capacities, self.engines[0].facts.block_size)

    @property
    def clock(self) -> Clock:
        """The clock that all meters share."""
        return self.engines[0].meter.clock

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would be computed."""
        return any(replica.ready for replica in self.engines)

    @property
    def outage(self) -> str | None:
        """Why every engine is gone; None while one is there."""
        return self.first_cause if all(replica.is_lost for replica in self.engines) else None

    @property
    def facts(self) -> ModelInfo:
        """Facts that hold for every engine: those of the one with the smallest KV cache."""
        return min((replica.facts for replica in self.engines), key=lambda facts: facts.num_kv_blocks)

    def next_id(self) -> int:
        return next(self._ids)

    def submit_many(self, pairs: Iterable[tuple[Request, Sink]]) -> list[TrackedRequest]:
        """Open requests; all choices of a prompt go to one engine. They wait while every engine is being replaced.

        Raises EngineDead if no engine will be replaced any more.
        """
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        meter = self.engines[0].meter
        tracked = [TrackedRequest(request, sink, self, meter) for request, sink in pairs]
        self._open.update((one.id, one) for one in tracked)
        self._place(tracked)
        return tracked

    def abort(self, ids: Sequence[int]) -> None:
        """End requests; their sinks are not called again. Ignores ids that have ended already."""
        aborted = [tracked for request_id in ids if (tracked := self._open.pop(request_id, None)) is not None]
        self._withdraw(aborted)
        for tracked in aborted:
            self._count_usage(tracked)
            self._end_isolation(tracked)

    def lose(self, lost: Mapping[int, Collection[int]], cause: ServeError) -> bool:
        """Engines are gone: continue their requests elsewhere.

        lost: engine index -> engine request ids of the step in which it died; empty if that step is not to blame.
        Returns whether the request that killed the engine was found, and ended.
        """
        for index in lost:
            self.engines[index].mark_lost()
            if self._router is not None:
                self._router.forget(index)
        now = self.clock.read()
        for tracked in self._open.values():
            if tracked.is_placed and tracked.engine in lost:
                self._quarantine.record_loss(tracked, was_computed=tracked.request.id in lost[tracked.engine])
                tracked.begin_replay(now, str(cause))
                tracked.take_back(self.next_id())
        culprit = self._quarantine.find_culprit(lost)
        if culprit is not None:
            del self._open[culprit.id]
            for tracked in self._open.values():
                self._quarantine.clear(tracked)
            culprit.fail(f"this request has ended the engine {culprit.num_deaths} times, alone at the last: {cause}")
        self._place_waiting()
        return culprit is not None

    def join(self, engines: Mapping[int, EngineHandle]) -> None:
        """Replacements of lost engines are ready. engines: by index."""
        for index, engine in engines.items():
            replica = self.engines[index]
            replica.replace(engine)
            if self._router is not None:
                self._router.resize(index, self._cache_blocks(replica))
        self._place_waiting()

    def give_up(self, cause: ServeError) -> None:
        """No engine will be replaced any more: end every open request with the cause and take no new ones."""
        self._failure = cause
        open_requests = self._open
        self._open = {}
        for tracked in open_requests.values():
            tracked.fail(str(cause))

    # Reports of tracked requests

    def on_prompt_computed(self, tracked: TrackedRequest) -> None:
        if self._router is not None:
            self._router.mark_computed(tracked.request.id)

    def on_finish(self, tracked: TrackedRequest) -> None:
        if self._router is not None:
            self._router.release(tracked.request.id)
        self._open.pop(tracked.id, None)
        self.num_finished += 1
        self._count_usage(tracked)
        self._end_isolation(tracked)

    def _count_usage(self, tracked: TrackedRequest) -> None:
        self.usage.count(tracked.request, None if tracked.output_ids is None else tracked.num_received)

    def on_cleared(self, tracked: TrackedRequest) -> None:
        self._quarantine.clear(tracked)
        self._end_isolation(tracked)

    # Placement

    def _cache_blocks(self, replica: Replica) -> int:
        return replica.facts.num_kv_blocks + replica.facts.num_offload_blocks if self._prefix_caching else 0

    def _place_waiting(self) -> None:
        """Submit what waits: one suspect to an idle engine, and all requests that are not suspects."""
        waiting = [tracked for tracked in self._open.values() if not tracked.is_placed]
        suspect = self._quarantine.choose_suspect(waiting)
        if suspect is not None:
            busy = {tracked.engine for tracked in self._open.values() if tracked.is_placed}
            idle = (index for index, one in enumerate(self.engines) if not one.is_lost and index not in busy)
            engine = next(idle, None)
            if engine is not None:
                self._quarantine.isolate(suspect, engine)
                self._submit(engine, [suspect])
        self._place([tracked for tracked in waiting if not self._quarantine.is_suspect(tracked)])

    def _place(self, requests: Sequence[TrackedRequest]) -> None:
        """Submit requests to the engines that the router chooses; none if every engine is lost or reserved."""
        present = [
            index
            for index, replica in enumerate(self.engines)
            if not replica.is_lost and not self._quarantine.is_reserved(index)
        ]
        if not present:
            return
        if self._router is None:
            self._submit(0, requests)
            return
        # An engine without a heartbeat may recover within a moment: use it if there is no other.
        candidates = [index for index in present if self.engines[index].ready] or present
        by_engine: list[list[TrackedRequest]] = [[] for _ in self.engines]
        # Choices of a prompt share one list of ids.
        for _, group in groupby(requests, key=lambda tracked: id(tracked.request.prompt_ids)):
            choices = list(group)
            first = choices[0].request
            request_ids = [tracked.request.id for tracked in choices]
            adapter = "" if first.adapter is None else first.adapter.digest
            engine = self._router.place(request_ids, first.prompt_ids, first.cache_salt, candidates, adapter)
            by_engine[engine] += choices
        for index, chosen in enumerate(by_engine):
            self._submit(index, chosen)

    def _submit(self, index: int, requests: Sequence[TrackedRequest]) -> None:
        replica = self.engines[index]
        for tracked in requests:
            tracked.engine = index
            tracked.meter = replica.meter
            tracked.is_placed = True
        if requests:
            replica.engine.submit_many([(tracked.request, tracked.receive) for tracked in requests])

    def _withdraw(self, requests: Sequence[TrackedRequest]) -> None:
        """Abort requests on the engines that compute them."""
        by_engine: list[list[int]] = [[] for _ in self.engines]
        for tracked in requests:
            if tracked.is_placed:
                by_engine[tracked.engine].append(tracked.request.id)
                if self._router is not None:
                    self._router.release(tracked.request.id)
        for replica, ids in zip(self.engines, by_engine, strict=True):
            if ids:
                replica.engine.abort(ids)

    def _end_isolation(self, tracked: TrackedRequest) -> None:
        """If this request ran alone, let the next suspect run, or else all others."""
        if not self._quarantine.release(tracked):
            return
        if tracked.id in self._open and any(map(self._quarantine.is_suspect, self._open.values())):
            self._withdraw([tracked])  # the next suspect needs the engine for itself
            tracked.take_back(self.next_id())
        self._place_waiting()
