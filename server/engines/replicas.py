"""Data-parallel replicas: several engines with the same model behind one interface. A single engine is one replica.

Every request runs on one engine, chosen by `router`, until that engine dies. Its requests then continue on the others
or wait for its replacement; `quarantine` finds requests that crash engines. `server.engines.supervisor` manages the
processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count, groupby

from serve_llm.common.errors import EngineDead, ServeError
from serve_llm.common.types import EngineCoreRequest, ModelInfo
from serve_llm.server.engines.quarantine import Quarantine
from serve_llm.server.engines.replica import EngineHandle, Replica, Sink
from serve_llm.server.engines.restarts import RestartRecord
from serve_llm.server.engines.router import Router
from serve_llm.server.engines.tracked_request import TrackedRequest
from serve_llm.server.metrics.meter import AdaptersInUse, Clock, Meter
from serve_llm.server.metrics.usage import UsageMeter

MAX_RESTARTS_SHOWN = 20


class Replicas:
    """Create it when all engines are ready: the router needs their cache sizes."""

    def __init__(
        self, engines: Sequence[EngineHandle], *, prefix_caching: bool = True, spare_meters: Sequence[Meter] = ()
    ) -> None:
        """spare_meters: one for each engine that may be added later, in the order of their indices."""
        self.engines = (*(Replica(engine.meter, engine) for engine in engines), *map(Replica, spare_meters))
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
            capacities = [self._cache_blocks(replica) if replica.is_active else 0 for replica in self.engines]
            self._router = Router(capacities, self.engines[0].model_info.block_size)

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
        """Why all engines are gone; None while any is left."""
        return self.first_cause if all(replica.is_lost for replica in self.engines) else None

    @property
    def model_info(self) -> ModelInfo:
        """What holds for every engine: that of the engine with the smallest KV cache."""
        return min((replica.model_info for replica in self.active), key=lambda model_info: model_info.num_kv_blocks)

    @property
    def active(self) -> tuple[Replica, ...]:
        """The engines without those that may be added later. They have the first indices."""
        return tuple(replica for replica in self.engines if replica.is_active)

    def next_id(self) -> int:
        return next(self._ids)

    def submit_many(self, pairs: Iterable[tuple[EngineCoreRequest, Sink]]) -> list[TrackedRequest]:
        """Submit requests; all choices of a prompt go to one engine. They wait while all engines are being replaced.

        Raises EngineDead if no engine will be replaced.
        """
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        meter = self.engines[0].meter
        tracked = [TrackedRequest(request, sink, self, meter) for request, sink in pairs]
        self._open.update((one.id, one) for one in tracked)
        self._place(tracked)
        return tracked

    def abort(self, ids: Sequence[int]) -> None:
        """Abort requests; their sinks are not called again. Ignores ids that have already ended."""
        aborted = [tracked for request_id in ids if (tracked := self._open.pop(request_id, None)) is not None]
        self._withdraw(aborted)
        for tracked in aborted:
            self._count_usage(tracked)
            self._end_isolation(tracked)

    def drop_lost(self, lost: Mapping[int, Collection[int]], cause: ServeError) -> bool:
        """Continue the requests of dead engines elsewhere.

        lost: engine index -> engine request ids of the step in which it died; empty if that step is not to blame.
        Returns whether the request that killed the engine was found and ended.
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
                tracked.prepare_resubmission(self.next_id())
        culprit = self._quarantine.find_culprit(lost)
        if culprit is not None:
            del self._open[culprit.id]
            for tracked in self._open.values():
                self._quarantine.clear(tracked)
            culprit.fail(f"this request crashed the engine {culprit.num_deaths} times, the last time alone: {cause}")
        self._place_waiting()
        return culprit is not None

    def join(self, engines: Mapping[int, EngineHandle]) -> None:
        """Start to use replacements of lost engines, or added engines, that are ready. engines: by index."""
        for index, engine in engines.items():
            replica = self.engines[index]
            replica.replace(engine)
            if self._router is not None:
                self._router.resize(index, self._cache_blocks(replica))
        self._place_waiting()

    def list_adapters_in_use(self) -> AdaptersInUse:
        running: set[str] = set()
        waiting: set[str] = set()
        for tracked in self._open.values():
            if tracked.request.adapter is not None:
                names = waiting if tracked.output_ids is None else running
                names.add(tracked.request.adapter.name)
        return AdaptersInUse(sorted(running), sorted(waiting))

    def drain(self, index: int) -> None:
        """Place no more requests on an engine, which will be retired."""
        self.engines[index].is_draining = True

    def count_open(self, index: int) -> int:
        """Count the requests on an engine that have not ended."""
        return sum(tracked.is_placed and tracked.engine == index for tracked in self._open.values())

    def retire(self, index: int) -> None:
        """Continue the requests of an engine elsewhere, because it is about to be removed."""
        moved = [tracked for tracked in self._open.values() if tracked.is_placed and tracked.engine == index]
        self._withdraw(moved)
        self.engines[index].retire()
        if self._router is not None:
            self._router.forget(index)
            self._router.resize(index, 0)
        now = self.clock.read()
        for tracked in moved:
            self._quarantine.release(tracked)
            tracked.begin_replay(now, f"engine {index} is removed")
            tracked.prepare_resubmission(self.next_id())
        self._place_waiting()

    def give_up(self, cause: ServeError) -> None:
        """End every open request with the cause and accept no new ones, because no engine will be replaced."""
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
        model_info = replica.model_info
        caches = self._prefix_caching and model_info.prefix_caching
        return model_info.num_kv_blocks + model_info.num_offload_blocks if caches else 0

    def _place_waiting(self) -> None:
        """Submit waiting requests: one suspect to an idle engine, and all that are not suspects."""
        waiting = self._list_waiting()
        suspect = self._quarantine.choose_suspect(waiting)
        if suspect is not None:
            engine = self._free_engine()
            waiting = self._list_waiting()  # with those that an engine was freed of
            if engine is not None:
                self._quarantine.isolate(suspect, engine)
                self._submit(engine, [suspect])
        self._place([tracked for tracked in waiting if not self._quarantine.is_suspect(tracked)])

    def _list_waiting(self) -> list[TrackedRequest]:
        return [tracked for tracked in self._open.values() if not tracked.is_placed]

    def _free_engine(self) -> int | None:
        """Return an engine without requests. If there is none and none will be replaced, take the requests off one."""
        by_engine: dict[int, list[TrackedRequest]] = {
            index: [] for index, replica in enumerate(self.engines) if replica.accepts
        }
        for tracked in self._open.values():
            if tracked.is_placed and tracked.engine in by_engine:
                by_engine[tracked.engine].append(tracked)
        if not by_engine:
            return None
        engine = min(by_engine, key=lambda index: len(by_engine[index]))
        if by_engine[engine] and any(replica.is_lost for replica in self.active):
            return None
        self._withdraw(by_engine[engine])
        for tracked in by_engine[engine]:
            tracked.prepare_resubmission(self.next_id())
        return engine

    def _place(self, requests: Sequence[TrackedRequest]) -> None:
        """Submit requests to the engines that the router chooses; none if every engine is lost or reserved."""
        present = [
            index
            for index, replica in enumerate(self.engines)
            if replica.accepts and not self._quarantine.is_reserved(index)
        ]
        if not present:
            return
        if self._router is None:
            self._submit(0, requests)
            return
        # An engine without a heartbeat may recover soon: use it only if there is no other.
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
            assert replica.engine is not None, "a lost engine gets no requests"
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
            if ids and replica.engine is not None:
                replica.engine.abort(ids)

    def _end_isolation(self, tracked: TrackedRequest) -> None:
        """If this request ran alone, start the next suspect, or else all other requests."""
        if not self._quarantine.release(tracked):
            return
        if tracked.id in self._open and any(map(self._quarantine.is_suspect, self._open.values())):
            self._withdraw([tracked])  # the next suspect needs an engine to itself
            tracked.prepare_resubmission(self.next_id())
        self._place_waiting()
