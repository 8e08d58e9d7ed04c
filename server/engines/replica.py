"""One data-parallel engine: its current process, its state, and the counters of all its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Protocol

import msgspec

from serve_llm.common.types import (
    EngineCoreOutput,
    EngineCoreRequest,
    EPLBStats,
    ModelInfo,
    OffloadStats,
    SchedulerStats,
)
from serve_llm.server.metrics.meter import Meter

Sink = Callable[[EngineCoreOutput], None]


class EngineHandle(Protocol):
    """The part of `server.engines.client.EngineClient` that replicas use."""

    meter: Meter  # counts the engine's steps
    stats: SchedulerStats

    @property
    def ready(self) -> bool: ...

    @property
    def model_info(self) -> ModelInfo: ...

    def submit_many(self, pairs: Iterable[tuple[EngineCoreRequest, Sink]]) -> None: ...

    def abort(self, ids: Sequence[int]) -> None: ...


class Replica:
    """One engine: its current process, and the counters of all its processes so far."""

    def __init__(self, meter: Meter, engine: EngineHandle | None = None) -> None:
        """meter: counts for all processes of the engine, one after the other. engine: None: it is not started yet."""
        self.meter = meter
        self.engine = engine  # None: not started, or removed by scaling down
        self.is_lost = engine is None  # there is no process, or it is gone and has not been replaced yet
        self.is_draining = False  # accepts no more requests, because it is about to be stopped
        self.has_served = engine is not None
        self._past = SchedulerStats()  # counters of the previous processes

    @property
    def is_active(self) -> bool:
        """Whether it counts as an engine. A dead engine does, because it will be replaced."""
        return self.engine is not None

    @property
    def accepts(self) -> bool:
        """Whether requests may be placed on it. The engine may be briefly unresponsive, see `ready`."""
        return not self.is_lost and not self.is_draining

    @property
    def ready(self) -> bool:
        return self.engine is not None and self.engine.ready and not self.is_draining

    @property
    def model_info(self) -> ModelInfo:
        assert self.engine is not None, "it is not active"
        return self.engine.model_info

    @property
    def stats(self) -> SchedulerStats:
        """Gauges of the current process; counters since the server started."""
        if self.is_lost or self.engine is None:
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
            num_lookup_drafts=past.num_lookup_drafts + now.num_lookup_drafts,
            num_lookup_draft_tokens=past.num_lookup_draft_tokens + now.num_lookup_draft_tokens,
            num_lookup_accepted_tokens=past.num_lookup_accepted_tokens + now.num_lookup_accepted_tokens,
            num_forced_tokens=past.num_forced_tokens + now.num_forced_tokens,
            accepted_by_position=[
                sum(pair) for pair in zip_longest(past.accepted_by_position, now.accepted_by_position, fillvalue=0)
            ],
            offload_memory=_add_offload(past.offload_memory, now.offload_memory),
            offload_disk=_add_offload(past.offload_disk, now.offload_disk),
            eplb=_add_eplb(past.eplb, now.eplb),
        )

    def mark_lost(self) -> None:
        stats = self.stats
        for tier in (stats.offload_memory, stats.offload_disk):
            if tier is not None:
                tier.num_blocks = 0
                tier.num_bytes = 0
        self._past = msgspec.structs.replace(
            stats,
            num_running=0,
            num_waiting=0,
            num_deferred=0,
            kv_cache_usage=0.0,
            step_tokens=0,
            eplb=None if stats.eplb is None else stats.eplb.without_rows(),
        )
        self.is_lost = True

    def replace(self, engine: EngineHandle) -> None:
        """Switch to another process."""
        self.engine = engine
        self.is_lost = False
        self.is_draining = False
        self.has_served = True

    def retire(self) -> None:
        """Mark the engine as permanently stopped: it will not be replaced."""
        if not self.is_lost:
            self.mark_lost()
        self.engine = None


def _add_offload(past: OffloadStats | None, now: OffloadStats | None) -> OffloadStats | None:
    return past if now is None else now.add(past or OffloadStats())


def _add_eplb(past: EPLBStats | None, now: EPLBStats | None) -> EPLBStats | None:
    return past if now is None else now.add_counters(past or EPLBStats())
