from __future__ import annotations

import asyncio
import logging

import pytest

from serve_llm.engine.types import Stats
from serve_llm.engine.wire import Step
from serve_llm.server import statistics
from serve_llm.server.metrics import Meter
from serve_llm.server.statistics import Statistics


class Engine:
    stats = Stats()

    def __init__(self) -> None:
        self.meter = Meter()


def test_a_line_per_interval_while_there_are_steps_and_none_after(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        timers: list[tuple[float, object]] = []
        monkeypatch.setattr(loop, "call_later", lambda seconds, call: timers.append((seconds, call)) or object())
        now = [100.0]
        monkeypatch.setattr(Meter, "clock", staticmethod(lambda: now[0]))
        engine = Engine()
        log = Statistics([engine])
        assert timers == []  # nothing runs while there is no traffic

        log.count_step(0, Step([], engine.stats))
        engine.meter.count_prompt(300)
        engine.stats = Stats(2, 1, 0.25, 300, 150, 0, 1, 300)
        log.count_step(0, Step([], engine.stats))
        engine.meter.count_tokens(50, None)
        (seconds, tick) = timers.pop()
        assert seconds == 10.0
        now[0] += 10
        tick()
        assert [record.getMessage() for record in caplog.records] == [
            "Prompt throughput: 30.0 tokens/s, generation throughput: 5.0 tokens/s, running: 2, waiting: 1, "
            "KV cache usage: 25.0%, prefix cache hit rate: 50.0%"
        ]
        (seconds, tick) = timers.pop()
        now[0] += 10
        tick()  # an interval without steps: no line, no further timer
        assert len(caplog.records) == 1 and timers == []
        log.count_step(0, Step([], engine.stats))
        assert len(timers) == 1

    assert statistics.INTERVAL_SECONDS == 10.0
    with caplog.at_level(logging.INFO):
        asyncio.run(run())
