"""Measure what very many ranks cost an engine's own process: to start them, to send them a step, to notice a loss.

Run: PYTHONPATH=tests python -m bench.many_ranks [--nodes 128] [--ranks-per-node 8] [--steps 100]. The ranks are fake
and share this machine's cores (`support.fake_hosts`); the engine's side and all connections are real. Prints a table,
then one JSON line. Processor times are those of the engine's side.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

from serve_llm.common.errors import HostLost
from serve_llm.common.open_files import raise_limit
from support.fake_engine import FakeRanksEngine

IDLE_SECONDS = 5.0


def measure(nodes: int, ranks_per_node: int, num_steps: int) -> dict[str, float]:
    found: dict[str, float] = {}
    began = time.process_time()
    with FakeRanksEngine(nodes, ranks_per_node) as engine:
        found |= {f"{phase} after s": seconds for phase, seconds in engine.times.items()}
        found["processor time until then, s"] = time.process_time() - began
        found["open files"] = len(os.listdir("/proc/self/fd"))
        began = time.process_time()
        time.sleep(IDLE_SECONDS)
        found["processor time without steps, ms per s"] = (time.process_time() - began) / IDLE_SECONDS * 1e3
        began = time.process_time()
        seconds = [measure_step(engine) for _ in range(num_steps)]
        found["processor time of a step, ms"] = (time.process_time() - began) / num_steps * 1e3
        found["step and answer, least ms"] = min(seconds) * 1e3
        found["step and answer, median ms"] = statistics.median(seconds) * 1e3
        if nodes > 1:
            found["loss of a node noticed after s"] = measure_loss(engine)
        began = time.perf_counter()
    found["stopped after s"] = time.perf_counter() - began
    return found


def measure_step(engine: FakeRanksEngine) -> float:
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


def measure_loss(engine: FakeRanksEngine) -> float:
    began = time.perf_counter()
    engine.last_node.kill()
    try:
        while True:
            engine.step()
    except HostLost:
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    raise_limit()
    found = measure(given.nodes, given.ranks_per_node, given.steps)
    for name, value in found.items():
        print(f"{name:40} {value:>10.2f}")
    print(json.dumps({"ranks": given.nodes * given.ranks_per_node} | found))


if __name__ == "__main__":
    main()
