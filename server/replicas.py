"""Data parallelism: several engines with the same model, seen as one. A single engine is a set of one.

Every request goes to one engine and stays there as long as that lives; `server.balance` says to which. When an engine
dies, its requests go on at the others, or wait for the one that takes its place. A request that was computed at two
deaths in a row is suspected of being their cause: it then runs alone, and ends with an error if that kills an engine
again. Knows nothing of processes (those are `server.supervise`'s) and nothing of text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, groupby
from typing import Protocol

import msgspec

from serve_llm.engine.errors import EngineDead, ServeError
from serve_llm.engine.types import ModelFacts, Output, Request, Stats
from serve_llm.engine.wire import Step
from serve_llm.server.balance import Balancer
from serve_llm.server.metrics import Meter
from serve_llm.server.record import Record

Sink = Callable[[Output], None]

SUSPECT = 2  # deaths in a row after which a request runs alone


class Engine(Protocol):
    """What of `engine.client.EngineClient` the server uses."""

    stats: Stats
    on_step: Callable[[Step], None] | None

    @property
    def ready(self) -> bool: ...

    @property
    def facts(self) -> ModelFacts: ...

    def submit_many(self, pairs: Iterable[tuple[Request, Sink]]) -> None: ...

    def abort(self, ids: Sequence[int]) -> None: ...


class Replica:
    """One of the engines, whichever process it is at the moment, and what was counted of all of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.meter = Meter()
        self.trial: Record | None = None  # the suspect that it computes, and nothing else
        self._past = Stats()  # the counters of the processes before this one
        self.is_lost = False  # the process is gone, and there is no other yet

    @property
    def ready(self) -> bool:
        return self.engine.ready

    @property
    def facts(self) -> ModelFacts:
        return self.engine.facts

    @property
    def stats(self) -> Stats:
        """Gauges of the process that runs; counters since the server started."""
        if self.is_lost:
            return self._past
        now, past = self.engine.stats, self._past
        return msgspec.structs.replace(
            now,
            prefix_cache_queries=past.prefix_cache_queries + now.prefix_cache_queries,
            prefix_cache_hits=past.prefix_cache_hits + now.prefix_cache_hits,
            num_preemptions=past.num_preemptions + now.num_preemptions,
            num_steps=past.num_steps + now.num_steps,
        )

    def lose(self) -> None:
        """The process is gone."""
        idle = {"num_running": 0, "num_waiting": 0, "kv_cache_usage": 0.0, "step_tokens": 0}
        self._past = msgspec.structs.replace(self.stats, **idle)
        self.is_lost = True
        self.trial = None

    def replace(self, engine: Engine) -> None:
        self.engine = engine
        self.is_lost = False


class Replicas:
    """Make it when all engines are ready: how much each can cache is known only then."""

    def __init__(self, engines: Sequence[Engine], *, prefix_caching: bool = True) -> None:
        self.engines = tuple(map(Replica, engines))
        self.on_step: Callable[[int, Step], None] | None = None  # called with the engine's index
        self.num_restarts = 0  # of engines; this and the next are kept by whoever restarts them, for /status
        self.first_cause: str | None = None  # of the newest restart
        self.num_finished = 0  # requests that an engine has brought to their end
        self._failure: ServeError | None = None
        self._prefix_caching = prefix_caching
        self._ids = count(1)
        self._open: dict[int, Record] = {}  # by the id that its first engine got, in the order of submission
        self._balancer: Balancer | None = None  # a single engine needs none
        if len(self.engines) > 1:
            capacities = [self._capacity(engine) for engine in self.engines]
            self._balancer = Balancer(capacities, self.engines[0].facts.block_size)
        for index in range(len(self.engines)):
            self._listen(index)

    def _capacity(self, engine: Replica) -> int:
        return engine.facts.num_kv_blocks if self._prefix_caching else 0

    def _listen(self, index: int) -> None:
        self.engines[index].engine.on_step = partial(self._count_step, index)

    @property
    def ready(self) -> bool:
        """A request submitted now would be computed."""
        return any(engine.ready for engine in self.engines)

    @property
    def outage(self) -> str | None:
        """Why every engine is gone; None while one is there."""
        return self.first_cause if all(engine.is_lost for engine in self.engines) else None

    @property
    def facts(self) -> ModelFacts:
        """What is true of every engine: those of the one with the smallest KV cache."""
        return min((engine.facts for engine in self.engines), key=lambda facts: facts.num_kv_blocks)

    def next_id(self) -> int:
        return next(self._ids)

    def submit_many(self, pairs: Iterable[tuple[Request, Sink]]) -> list[Record]:
        """Open requests, all choices of a prompt on one engine; they wait if there is none just now.
        Raises EngineDead if there will be none any more."""
        if self._failure is not None:
            raise EngineDead(str(self._failure))
        records = [Record(request, sink, self._changed) for request, sink in pairs]
        self._open.update((record.id, record) for record in records)
        self._place(records)
        return records

    def abort(self, ids: Sequence[int]) -> None:
        """End requests; their sinks are not called again. Ids that have ended already are fine."""
        records = [record for request_id in ids if (record := self._open.pop(request_id, None)) is not None]
        self._withdraw(records)
        for record in records:
            self._end_trial(record)

    def lose(self, lost: Mapping[int, Collection[int]], cause: ServeError) -> bool:
        """Engines are gone: their requests go on elsewhere. lost: by engine, what it was computing, by its ids, if that
        may be the cause. Returns whether the request that is to blame was found, and ended."""
        suspect = next((trial for index in lost if (trial := self.engines[index].trial) is not None), None)
        for index in lost:
            self.engines[index].lose()
            if self._balancer is not None:
                self._balancer.forget(index)
        for record in self._open.values():
            if record.is_placed and record.engine in lost:
                record.take_back(self.next_id(), in_step=record.request.id in lost[record.engine])
                num_tokens = len(record.request.prompt_ids) + len(record.request.output_ids)
                self.engines[record.engine].meter.count_replayed(num_tokens)
        is_found = suspect is not None and suspect.deaths > SUSPECT
        if suspect is not None and is_found:
            del self._open[suspect.id]
            for record in self._open.values():
                record.deaths = 0  # it was this one
            suspect.fail(f"this request has ended the engine {suspect.deaths} times, alone at the last: {cause}")
        self._settle()
        return is_found

    def join(self, engines: Mapping[int, Engine]) -> None:
        """Other processes are ready in the places of those that are gone."""
        for index, engine in engines.items():
            replica = self.engines[index]
            replica.replace(engine)
            self._listen(index)
            if self._balancer is not None:
                self._balancer.resize(index, self._capacity(replica))
        self._settle()

    def give_up(self, cause: ServeError) -> None:
        """No engine will come any more: every open request ends with this, and no new one is taken."""
        self._failure = cause
        ended, self._open = self._open, {}
        for record in ended.values():
            record.fail(str(cause))

    # where requests run

    def _settle(self) -> None:
        """Give the engines what waits: one suspect, on an engine where nothing else runs, and all others."""
        waiting = [record for record in self._open.values() if not record.is_placed]
        # Whoever kills gets nowhere, and what ran well before it came is not to blame: the likeliest first.
        suspects = (record for record in waiting if record.deaths >= SUSPECT)
        suspect = min(suspects, key=lambda record: (record.num_received, -record.id), default=None)
        if suspect is not None and all(engine.trial is None for engine in self.engines):
            busy = {record.engine for record in self._open.values() if record.is_placed}
            empty = (index for index, engine in enumerate(self.engines) if not engine.is_lost and index not in busy)
            if (index := next(empty, None)) is not None:
                self.engines[index].trial = suspect
                self._submit(index, [suspect])
        self._place([record for record in waiting if record.deaths < SUSPECT])

    def _place(self, records: Sequence[Record]) -> None:
        there = [index for index, engine in enumerate(self.engines) if not engine.is_lost and engine.trial is None]
        if not there:
            return
        able = [index for index in there if self.engines[index].ready] or there  # one may be silent for a moment
        if self._balancer is None:
            self._submit(0, records)
            return
        parts: list[list[Record]] = [[] for _ in self.engines]
        for _, group in groupby(records, key=lambda record: id(record.request.prompt_ids)):  # choices share it
            choices = list(group)
            first, ids = choices[0].request, [record.request.id for record in choices]
            parts[self._balancer.place(ids, first.prompt_ids, first.cache_salt, able)] += choices
        for index, part in enumerate(parts):
            self._submit(index, part)

    def _submit(self, index: int, records: Sequence[Record]) -> None:
        for record in records:
            record.engine, record.is_placed = index, True
        if records:
            self.engines[index].engine.submit_many([(record.request, record.receive) for record in records])

    def _withdraw(self, records: Sequence[Record]) -> None:
        """Make the engines drop these requests."""
        parts: list[list[int]] = [[] for _ in self.engines]
        for record in records:
            if record.is_placed:
                parts[record.engine].append(record.request.id)
                if self._balancer is not None:
                    self._balancer.ended(record.request.id)
        for replica, part in zip(self.engines, parts, strict=True):
            if part:
                replica.engine.abort(part)

    def _changed(self, record: Record, has_ended: bool) -> None:
        """A record's hook: it has ended, or is no longer suspected."""
        if has_ended:
            self._open.pop(record.id, None)
            self.num_finished += 1
        self._end_trial(record)

    def _end_trial(self, record: Record) -> None:
        """The suspect that ran alone has ended or is cleared: the next one's turn, and then the others'."""
        replica = self.engines[record.engine]
        if replica.trial is not record:
            return
        replica.trial = None
        if record.id in self._open and any(other.deaths >= SUSPECT for other in self._open.values()):
            self._withdraw([record])  # the next one shall be alone as well
            record.take_back(self.next_id())
        self._settle()

    def _count_step(self, index: int, step: Step) -> None:
        """An engine's step hook, called before the step's outputs are handed out."""
        if self._balancer is not None:
            for output in step.outputs:
                if output.finish_reason is not None:
                    self._balancer.ended(output.id)
                elif output.cached_tokens is not None:
                    self._balancer.began(output.id)
        if self.on_step is not None:
            self.on_step(index, step)
