"""Rounds of 32 mixed streams, in each of which something dies or hangs at a random moment: every stream is complete and
equal to the undisturbed run, no process is left over, and nothing grows. The seed makes a failure repeatable.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass

import psutil
import pytest

from support.daemon import Daemon
from support.streams import Streams, mixed

OPTIONS = ("demo", "--kv-cache-memory", "64MiB", "--max-restarts", "1000000")
SEED = 11
LIMIT = 120.0
SETTLED = 5  # the round from which on nothing may grow


@dataclass
class Chaos:
    """A daemon and the dice."""

    daemon: Daemon
    rng: random.Random
    num_ranks: int

    def victims(self) -> list[int]:
        """The engine and its ranks."""
        engine = self.daemon.engine_pid()
        return [engine, *(self.daemon.rank_pids(engine).values() if self.num_ranks > 1 else ())]

    def strike(self, number: signal.Signals) -> int:
        """Send a signal to one of them; the engine's pid."""
        victims = self.victims()
        os.kill(self.rng.choice(victims), number)
        return victims[0]

    def await_other_engine(self, than: int) -> int:
        deadline = time.monotonic() + LIMIT
        while True:
            found = [pid for pid in self.daemon.engine_pids() if pid != than]
            if found:
                return found[0]
            assert time.monotonic() < deadline, "\n".join(self.daemon.log[-30:])
            time.sleep(0.01)

    def await_recovery(self, number: int) -> None:
        """Until the daemon has recovered so many times."""
        deadline = time.monotonic() + LIMIT
        while self.daemon.metrics()["serve_llm_recovery_seconds_count"] < number:
            assert time.monotonic() < deadline and self.daemon.process.poll() is None, "\n".join(self.daemon.log[-30:])
            time.sleep(0.05)

    def fault(self, kind: str) -> None:
        recoveries = int(self.daemon.metrics()["serve_llm_recovery_seconds_count"])
        engine = self.strike(signal.SIGSTOP if kind == "hang" else signal.SIGKILL)
        if kind == "during recovery":
            os.kill(self.await_other_engine(engine), signal.SIGKILL)
        if kind == "two in a row":
            self.await_recovery(recoveries + 1)
            self.strike(signal.SIGKILL)
            recoveries += 1
        self.await_recovery(recoveries + 1)

    def held(self) -> tuple[int, int]:
        """(resident bytes, open descriptors) of the server."""
        server = psutil.Process(self.daemon.process.pid)
        return server.memory_info().rss, server.num_fds()


KINDS = ("death", "during recovery", "two in a row", "hang")


def run(chaos: Chaos, rounds: int) -> None:
    url = chaos.daemon.wait_until_serving()
    undisturbed = Streams(url, mixed()).finish()
    num_events = undisturbed.num_events
    seen: set[int] = set()
    before = (0, 0)
    for number in range(1, rounds + 1):
        seen |= set(chaos.victims())
        streams = Streams(url, mixed())
        streams.wait_for(chaos.rng.randrange(1, num_events // 2))
        chaos.fault(KINDS[number % len(KINDS)])
        assert streams.finish() == undisturbed, f"round {number}"
        now = chaos.victims()
        assert len(now) == 1 + (chaos.num_ranks if chaos.num_ranks > 1 else 0)
        assert not [pid for pid in seen - set(now) if psutil.pid_exists(pid)], "a process was left over"
        if number == min(SETTLED, rounds - 1):
            before = chaos.held()
    metrics = chaos.daemon.metrics()
    assert metrics["serve_llm_generation_tokens_total"] == (rounds + 1) * undisturbed.num_tokens
    assert metrics["serve_llm_num_requests_running"] == metrics["serve_llm_num_requests_waiting"] == 0
    after = chaos.held()
    assert after[0] <= 1.03 * before[0], f"resident memory grew from {before[0]:,} to {after[0]:,} bytes"
    assert after[1] <= 1.03 * before[1] + 2, f"open descriptors grew from {before[1]} to {after[1]}"


@pytest.mark.parametrize(
    ("grid", "rounds"),
    [
        pytest.param((2, 2), 4, id="2 x 2 ranks"),
        pytest.param((1, 1), 50, id="one rank, long", marks=pytest.mark.slow),
        pytest.param((2, 2), 50, id="2 x 2 ranks, long", marks=pytest.mark.slow),
    ],
)
def test_chaos(grid: tuple[int, int], rounds: int) -> None:
    tensor, pipeline = grid
    with Daemon(*OPTIONS, "-tp", str(tensor), "-pp", str(pipeline)) as daemon:
        daemon.wait_until_serving()
        run(Chaos(daemon, random.Random(SEED), tensor * pipeline), rounds)
