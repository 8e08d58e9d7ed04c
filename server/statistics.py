"""One log line every 10 s while there is traffic, and none while there is not: no timer runs then."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from serve_llm.engine.types import Stats
from serve_llm.engine.wire import Step
from serve_llm.server.metrics import Meter

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0


class Measured(Protocol):
    """What of the engine's client is logged."""

    stats: Stats


class Statistics:
    """The engine client's step hook: counts each step in the meter, and sees that the line is logged in time."""

    def __init__(self, meter: Meter, engine: Measured) -> None:
        self._meter = meter
        self._engine = engine
        self._timer: asyncio.TimerHandle | None = None
        self._steps = 0  # since the last line
        self._since = 0.0
        self._logged = (0, 0, 0, 0)  # what `_totals` gave when the last line was logged

    def count_step(self, step: Step) -> None:
        """Called in the event loop, before a step's outputs are handed out."""
        self._meter.count_step(step)
        self._steps += 1
        if self._timer is None:
            self._begin()

    def _begin(self) -> None:
        self._since = self._meter.clock()
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_SECONDS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._steps:
            return
        seconds = self._meter.clock() - self._since
        totals = self._totals()
        prompt, generation, queries, hits = (new - old for new, old in zip(totals, self._logged, strict=True))
        self._logged, self._steps = totals, 0
        stats = self._engine.stats
        logger.info(
            "Prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d, waiting: %d, "
            "KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%",
            prompt / seconds,
            generation / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * stats.kv_cache_usage,
            100 * hits / max(queries, 1),
        )
        self._begin()

    def _totals(self) -> tuple[int, int, int, int]:
        meter, stats = self._meter, self._engine.stats
        return meter.prompt_tokens, meter.generation_tokens, stats.prefix_cache_queries, stats.prefix_cache_hits
