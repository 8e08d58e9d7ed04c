"""Run all benchmarks that need no other server, in sequence: `make bench`, on a quiet machine, under 10 minutes.

Each is a separate program that prints a table and ends with one JSON line; the last line here combines them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

BENCHES = {
    "kernels": "serve_llm.kernels.bench",
    "steps": "bench.steps",
    "steps_int8": "bench.steps --quantization int8 --streams 1 8",
    "host_time": "bench.host_time",
    "throughput": "bench.throughput",
    "neighbour": "bench.neighbour --turns 1",
    "start": "bench.start",
    "frontend": "bench.frontend",
    "routing": "bench.routing --requests 800",
    "messages": "bench.messages",
    "parallel": "bench.parallel --rounds 2 --tokens 32",
    "accuracy": "bench.accuracy --files 2",
    "structured": "bench.structured",
    "first_token": "bench.first_token --turns 20",
    "speculation": "bench.speculation --tokens 100 --turns 3",
}


def run(command: str) -> object:
    """Run one benchmark and pass its output on. Returns the content of its JSON line, or None if the program failed."""
    process = subprocess.Popen([sys.executable, "-m", *command.split()], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = None
    for line in process.stdout:
        if line.startswith("{"):
            found = json.loads(line)
        else:
            print(line, end="", flush=True)
    return found if process.wait() == 0 else None


def main() -> int:
    found: dict[str, object] = {}
    seconds: dict[str, float] = {}
    for name, command in BENCHES.items():
        print(f"\n== {command}", flush=True)
        began = time.perf_counter()
        found[name] = run(command)
        seconds[name] = round(time.perf_counter() - began, 1)
    failed = [name for name, result in found.items() if result is None]
    print(f"\n{sum(seconds.values()):.0f} s: " + ", ".join(f"{name} {spent:.0f} s" for name, spent in seconds.items()))
    if failed:
        print(f"failed: {', '.join(failed)}")
    print(json.dumps(found | {"seconds": seconds}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
