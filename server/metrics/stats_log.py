"""One log line of throughput and load every 10 s while there is traffic. Only reads counters that others update."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from serve_llm.server.metrics.meter import MeasuredEngine

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 10.0


class _Totals(NamedTuple):
    """Counters over all engines since the server started."""

    num_steps: int
    prompt_tokens: int
    generation_tokens: int
    cache_queries: int
    cache_hits: int
    draft_tokens: int
    accepted_tokens: int
    offload_hits: int


class StatsLogger:
    def __init__(self, engines: Sequence[MeasuredEngine]) -> None:
        self._engines = engines
        self._logged = self._read_totals()  # at the end of the last interval

    async def run(self) -> None:
        """Log after each interval until cancelled."""
        clock = self._engines[0].meter.clock
        while True:
            began = clock.read()
            await asyncio.sleep(INTERVAL_SECONDS)
            self.log_interval(clock.read() - began)

    def log_interval(self, seconds: float) -> None:
        """Log the last `seconds`, unless no engine ran a step in that time."""
        before = self._logged
        totals = self._read_totals()
        self._logged = totals
        if totals.num_steps == before.num_steps:
            return
        stats = [engine.stats for engine in self._engines]
        usages = [engine.stats.kv_cache_usage for engine in self._engines if engine.ready]
        queries = totals.cache_queries - before.cache_queries
        logger.info(
            "Prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, running: %d, waiting: %d, "
            "KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%%s",
            (totals.prompt_tokens - before.prompt_tokens) / seconds,
            (totals.generation_tokens - before.generation_tokens) / seconds,
            sum(one.num_running for one in stats),
            sum(one.num_waiting for one in stats),
            100 * sum(usages) / max(1, len(usages)),
            100 * (totals.cache_hits - before.cache_hits) / max(queries, 1),
            _describe_drafts(totals.draft_tokens - before.draft_tokens, totals.accepted_tokens - before.accepted_tokens)
            + _describe_offload(totals.offload_hits - before.offload_hits),
        )

    def _read_totals(self) -> _Totals:
        stats = [engine.stats for engine in self._engines]
        meters = [engine.meter for engine in self._engines]
        return _Totals(
            num_steps=sum(one.num_steps for one in stats),
            prompt_tokens=sum(meter.prompt_tokens for meter in meters),
            generation_tokens=sum(meter.generation_tokens for meter in meters),
            cache_queries=sum(one.prefix_cache_queries for one in stats),
            cache_hits=sum(one.prefix_cache_hits for one in stats),
            draft_tokens=sum(one.num_draft_tokens for one in stats),
            accepted_tokens=sum(one.num_accepted_tokens for one in stats),
            offload_hits=sum(one.offload_memory.num_hits for one in stats if one.offload_memory is not None),
        )


def _describe_drafts(num_tokens: int, num_accepted: int) -> str:
    """Return "" if no draft was verified."""
    if not num_tokens:
        return ""
    return f", draft tokens: {num_tokens}, accepted: {100 * num_accepted / num_tokens:.1f}%"


def _describe_offload(num_blocks: int) -> str:
    """Return "" if no block was copied back."""
    return f", KV blocks copied back: {num_blocks}" if num_blocks else ""
