"""Rounds of 44 streams, of mixed completions and chats with calls, schemas and reasoning. In each round, something dies
or hangs at a random moment; every stream must be complete and equal to the undisturbed run, no process may be left
over, and nothing may grow. The seed makes a failure reproducible.

With `pytest -s` it prints the figures of docs/reliability.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from serve_llm.common.hub import resolve_model
from support.adapters import make_adapter
from support.daemon import Daemon
from support.speculation import NGRAM
from support.streams import Streams, chats, mixed
from support.tools import write_files

OPTIONS = ("demo", "--kv-cache-memory", "64MiB", "--max-restarts", "1000000")
SEED = 11
LIMIT = 120.0
COUNTERS = ("_total", "_count", "_sum", "_bucket")
SETTLED = 5  # from this round on, nothing may grow


class Held(NamedTuple):
    """Resources held by the server, and by the engine and its ranks together."""

    server_bytes: int  # resident
    server_files: int  # open descriptors
    engine_bytes: int
    engine_files: int


@dataclass
class Chaos:
    """A daemon and a source of randomness."""

    daemon: Daemon
    rng: random.Random
    num_ranks: int
    struck: Counter[str] = field(default_factory=Counter)  # "engine" or "rank 2" -> how often it was killed
    counters: dict[str, float] = field(default_factory=dict)

    @property
    def num_victims(self) -> int:
        return 1 + (self.num_ranks if self.num_ranks > 1 else 0)

    def victims(self) -> list[int]:
        """Return the engine and its ranks, in order."""
        engine = self.daemon.engine_pid()
        return [engine, *(pid for _, pid in sorted(self.daemon.rank_pids(engine).items()))]

    def strike(self, number: signal.Signals, victims: list[int]) -> None:
        """Send a signal to one of them."""
        chosen = self.rng.randrange(len(victims))
        self.struck[f"rank {chosen - 1}" if chosen else "engine"] += 1
        os.kill(victims[chosen], number)

    def await_other_victims(self, than: int) -> list[int]:
        """Wait for the next engine and its ranks."""
        deadline = time.monotonic() + LIMIT
        while True:
            if [pid for pid in self.daemon.engine_pids() if pid != than]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if len(found := self.victims()) == self.num_victims:
                        return found
            assert time.monotonic() < deadline, "\n".join(self.daemon.log[-30:])
            time.sleep(0.01)

    def await_recovery(self, number: int) -> None:
        """Wait until the daemon has recovered this many times."""
        deadline = time.monotonic() + LIMIT
        while self.daemon.metrics()["serve_llm_recovery_seconds_count"] < number:
            assert time.monotonic() < deadline and self.daemon.process.poll() is None, "\n".join(self.daemon.log[-30:])
            time.sleep(0.05)

    def fault(self, kind: str) -> None:
        recoveries = int(self.daemon.metrics()["serve_llm_recovery_seconds_count"])
        victims = self.victims()
        self.strike(signal.SIGSTOP if kind == "hang" else signal.SIGKILL, victims)
        if kind == "during recovery":
            self.strike(signal.SIGKILL, self.await_other_victims(victims[0]))
        if kind == "two in a row":
            self.await_recovery(recoveries + 1)
            self.strike(signal.SIGKILL, self.victims())
            recoveries += 1
        self.await_recovery(recoveries + 1)

    def check_counters(self) -> None:
        """Check that no counter has decreased since the last time."""
        found = {name: value for name, value in self.daemon.metrics().items() if name.endswith(COUNTERS)}
        assert not [name for name, value in self.counters.items() if found.get(name, 0.0) < value]
        self.counters = found

    def held(self) -> Held:
        server, *others = map(psutil.Process, (self.daemon.process.pid, *self.victims()))
        return Held(
            server.memory_info().rss,
            server.num_fds(),
            sum(process.memory_info().rss for process in others),
            sum(process.num_fds() for process in others),
        )

    def recoveries(self) -> list[float]:
        """Return the seconds of each recovery, from the log."""
        lines = (re.search(r"The engine is ready again after ([\d.]+) s", line) for line in self.daemon.log)
        return [float(found[1]) for found in lines if found]


ADAPTERS = ("a", "b", "c")
NUM_SLOTS = 2  # so that adapters take turns


def turn_on_drafts_and_adapters(directory: Path) -> list[str]:
    """Return the options."""
    modules = []
    for seed, name in enumerate(ADAPTERS):
        modules.append(
            f"{name}={make_adapter(resolve_model('demo'), directory / name, seed=seed, scale=0.1).directory}"
        )
    slots = ("--max-loras", str(NUM_SLOTS), "--max-cpu-loras", str(len(ADAPTERS)))
    return ["--enable-lora", *slots, "--lora-modules", *modules, "--speculative-config", json.dumps(NGRAM)]


KINDS = ("death", "during recovery", "two in a row", "hang")


def run(chaos: Chaos, rounds: int, models: tuple[str, ...]) -> None:
    """models: requests name them in turn."""
    url = chaos.daemon.wait_until_serving()
    bodies = [body | {"model": models[number % len(models)]} for number, body in enumerate([*mixed(), *chats()])]
    undisturbed = Streams(url, bodies).finish()
    seen: set[int] = set()
    before = chaos.held()
    for number in range(1, rounds + 1):
        seen |= set(chaos.victims())
        streams = Streams(url, bodies)
        streams.wait_for(chaos.rng.randrange(1, undisturbed.num_characters // 2))
        chaos.fault(KINDS[number % len(KINDS)])
        chaos.check_counters()
        assert streams.finish() == undisturbed, f"round {number}"
        now = chaos.victims()
        assert len(now) == chaos.num_victims
        assert not [pid for pid in seen - set(now) if psutil.pid_exists(pid)], "a process was left over"
        if number == min(SETTLED, rounds - 1):
            before = chaos.held()
    metrics = chaos.daemon.metrics()
    assert metrics["serve_llm_generation_tokens_total"] == (rounds + 1) * undisturbed.num_tokens
    assert metrics["serve_llm_num_requests_running"] == metrics["serve_llm_num_requests_waiting"] == 0
    after, recoveries = chaos.held(), chaos.recoveries()
    print(f"\n{rounds} rounds; victims: {dict(sorted(chaos.struck.items()))}; {before} -> {after}")
    print(f"recovered {len(recoveries)} times: median {statistics.median(recoveries)} s, at most {max(recoveries)} s")
    for name, first, last in zip(Held._fields, before, after, strict=True):
        assert last <= 1.03 * first + (2 if name.endswith("files") else 0), f"{name} grew from {first:,} to {last:,}"


LONG = pytest.mark.long


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT
@pytest.mark.parametrize(
    ("grid", "rounds", "has_both"),
    [
        pytest.param((2, 2), 4, False, id="2 x 2 ranks", marks=pytest.mark.slow),
        pytest.param((1, 1), 4, True, id="one rank, drafts and adapters", marks=pytest.mark.slow),
        pytest.param((1, 1), 50, False, id="one rank, long", marks=LONG),
        pytest.param((2, 2), 50, False, id="2 x 2 ranks, long", marks=LONG),
        pytest.param((1, 1), 50, True, id="one rank, drafts and adapters, long", marks=LONG),
        pytest.param((2, 2), 50, True, id="2 x 2 ranks, drafts and adapters, long", marks=LONG),
    ],
)
def test_chaos(grid: tuple[int, int], rounds: int, has_both: bool, tmp_path: Path) -> None:
    """has_both: with drafts, and with adapters that take turns."""
    tensor, pipeline = grid
    options = [word for pair in write_files(tmp_path).items() for word in pair]
    if has_both:
        options += turn_on_drafts_and_adapters(tmp_path)
    with Daemon(*OPTIONS, *options, "-tp", str(tensor), "-pp", str(pipeline)) as daemon:
        daemon.wait_until_serving()
        models = ("demo", *ADAPTERS) if has_both else ("demo",)
        run(Chaos(daemon, random.Random(SEED), tensor * pipeline), rounds, models)
        if has_both:
            metrics = daemon.metrics()
            assert metrics["serve_llm_spec_decode_num_accepted_tokens_total"] > 0
