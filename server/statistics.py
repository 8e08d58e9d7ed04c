"""One log line every 10 s while there is traffic, and none while there is not: no timer runs then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from serve_llm.engine.types import Stats
from serve_llm.engine.wire import Step
from serve_llm.server.metrics import Meter

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0


class Measured(Protocol):
    """What of an engine's client is logged."""

    meter: Meter

    @property
    def stats(self) -> Stats: ...


class Statistics:
    """The engines' step hook: counts each step in its engine's meter, and sees that the line is logged in time."""

    def __init__(self, engines: Sequence[Measured]) -> None:
        self._engines = engines
        self._timer: asyncio.TimerHandle | None = None
        self._steps = 0  # since the last line
        self._since = 0.0
        self._logged = (0, 0, 0, 0)  # what `_totals` gave when the last line was logged

    def count_step(self, index: int, step: Step) -> None:
        """Called in the event loop with the engine's index, before a step's outputs are handed out."""
        self._engines[index].meter.count_step(step)
        self._steps += 1
        if self._timer is None:
            self._begin()

    def _begin(self) -> None:
        self._since = Meter.clock()
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_SECONDS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if not self._steps:
            return
        seconds = Meter.clock() - self._since
        totals = self._totals()
        prompt, generation, queries, hits = (new - old for new, old in zip(totals, self._logged, strict=True))
        self._logged, self._steps = totals, 0
        stats = [engine.stats for engine in self._engines]
        logger.info(
            "Prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d, waiting: %d, "
            "KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%",
            prompt / seconds,
            generation / seconds,
            sum(one.num_running for one in stats),
            sum(one.num_waiting for one in stats),
            100 * sum(one.kv_cache_usage for one in stats) / len(stats),
            100 * hits / max(queries, 1),
        )
        self._begin()

    def _totals(self) -> tuple[int, int, int, int]:
        stats = [engine.stats for engine in self._engines]
        return (
            sum(engine.meter.prompt_tokens for engine in self._engines),
            sum(engine.meter.generation_tokens for engine in self._engines),
            sum(one.prefix_cache_queries for one in stats),
            sum(one.prefix_cache_hits for one in stats),
        )
