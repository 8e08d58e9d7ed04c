"""The throughput line: its content, and that it only reads metrics."""

from __future__ import annotations

import asyncio
import logging

import pytest

from serve_llm.common.types import SchedulerStats
from serve_llm.server.metrics import stats_log
from serve_llm.server.metrics.meter import Clock, Meter
from serve_llm.server.metrics.stats_log import StatsLogger


class Engine:
    ready = True
    has_served = True

    def __init__(self) -> None:
        self.meter = Meter(Clock())
        self.stats = SchedulerStats()


def test_an_interval_with_steps_is_one_line_and_one_without_is_none(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    log = StatsLogger([engine])
    with caplog.at_level(logging.INFO):
        log.log_interval(10.0)
        assert caplog.records == []

        engine.meter.count_prompt(300, 100, 1)
        engine.stats = SchedulerStats(2, 1, 0.25, 300, 150, 0, 1, 300)
        engine.meter.count_tokens(50, None)
        log.log_interval(10.0)
        assert [record.getMessage() for record in caplog.records] == [
            "Prompt throughput: 30.0 tokens/s, generation throughput: 5.0 tokens/s, running: 2, waiting: 1, "
            "KV cache usage: 25.0%, prefix cache hit rate: 50.0%"
        ]
        log.log_interval(10.0)
        assert len(caplog.records) == 1

        engine.meter.count_tokens(20, None)
        engine.stats = SchedulerStats(1, 0, 0.25, 300, 150, 0, 2, 1)
        log.log_interval(10.0)
        assert "generation throughput: 2.0 tokens/s" in caplog.records[1].getMessage(), "since the last line"
        assert "draft" not in caplog.records[1].getMessage()

        engine.stats = SchedulerStats(
            1, 0, 0.25, 300, 150, 0, 3, 1, num_drafts=2, num_draft_tokens=8, num_accepted_tokens=6
        )
        log.log_interval(10.0)
        assert caplog.records[2].getMessage().endswith(", draft tokens: 8, accepted: 75.0%")


def test_intervals_follow_each_other_until_cancelled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stats_log.INTERVAL_SECONDS == 10.0
    monkeypatch.setattr(stats_log, "INTERVAL_SECONDS", 0.001)

    async def run() -> None:
        engine = Engine()
        logging_task = asyncio.create_task(StatsLogger([engine]).run())
        while len(caplog.records) < 2:
            engine.stats.num_steps += 1
            await asyncio.sleep(0)
        logging_task.cancel()
        await asyncio.gather(logging_task, return_exceptions=True)

    with caplog.at_level(logging.INFO):
        asyncio.run(asyncio.wait_for(run(), 10))
