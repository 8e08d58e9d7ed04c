"""Measure how much of its speed a server keeps beside other programs that use the cores, as on shared machines.

Run on an otherwise idle machine:
    PYTHONPATH=tests python -m bench.neighbour [SERVER ...] [--peer NAME=PROGRAM[,MODEL] ...] [--model DIR]

SERVER and --peer are as in bench.compare; the default is serve-llm in bfloat16 and in int8. Measures one and eight
streams, alone and beside one and two busy loops (`while True: pass`). Servers take turns; all others are suspended.
Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from bench import load
from bench.model import IDS, model_folder
from bench.servers import SERVE_LLM, Recipe, Server, StartError, named, peer, running, stop_on_signals
from bench.workloads import WARM, Workload

WORKLOADS = (
    Workload("one stream", streams=1, prompt_tokens=16, output_tokens=64, requests=2),
    Workload("eight streams", streams=8, prompt_tokens=16, output_tokens=64, requests=16),
)
LOOPS = (0, 1, 2)
SETTLE_SECONDS = 0.2  # gives the scheduler time to move the loops

Speeds = dict[str, dict[str, dict[int, list[float]]]]  # workload -> server -> loops -> output tokens/s of each turn


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(SETTLE_SECONDS if loops else 0.0)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(servers: Sequence[Server], workloads: Sequence[Workload], turns: int, ids: Sequence[int]) -> Speeds:
    """Measure all servers in turns. They must be paused before the call, and are paused afterwards."""
    names = [server.name for server in servers]
    found: Speeds = {one.name: {name: {count: [] for count in LOOPS} for name in names} for one in workloads}
    for turn in range(turns):
        for workload in workloads:
            for server in servers:
                server.resume()
                for count in LOOPS:
                    with busy_loops(count):
                        result = load.run(server.url, workload, turn * len(LOOPS) + count, ids)
                    found[workload.name][server.name][count].append(result.tokens_per_second)
                    sys.stderr.write(f"turn {turn + 1}: {server.name:14} {count} loops {load.line(result)}\n")
                server.pause()
    return found


def table(found: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]) -> list[str]:
    """Format the medians, and the share of the undisturbed speed."""
    lines = []
    for workload, servers in found.items():
        lines.append(f"\n{workload}, output tokens/s")
        for name, speeds in servers.items():
            alone = statistics.median(speeds[0])
            cells = [f"alone {alone:7.1f}"]
            for count in LOOPS[1:]:
                speed = statistics.median(speeds[count])
                cells.append(f"{count} busy loop{'s' if count > 1 else ' '} {speed:7.1f} ({speed / alone:.2f})")
            lines.append(f"{name:16} " + "   ".join(cells))
    return lines


def ours(model: str) -> list[Recipe]:
    command = (SERVE_LLM, model, "--port", "{port}", "--max-num-seqs", "8", "--kv-cache-memory", "256MiB")
    command += ("--speculative-config", "none")  # its peers do not draft tokens
    int8 = (*command, "--quantization", "int8")
    return [named(f"{name}={' '.join(words)}", model) for name, words in (("bfloat16", command), ("int8", int8))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="*", metavar="SERVER")
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--model", help="the checkpoint that the servers load (default: the shape of Qwen2 0.5B)")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="threads for peers that do not choose them (default: 2)")
    parser.add_argument("--ids", type=load.id_range, default=IDS, help="token ids of prompts")
    given = parser.parse_args(arguments)
    stop_on_signals()
    model = given.model or str(model_folder())
    recipes = [named(text, model) for text in given.servers] + [peer(text, model, given.threads) for text in given.peer]
    try:
        with contextlib.ExitStack() as stack:
            servers = []
            for recipe in recipes or ours(model):
                server = stack.enter_context(running(recipe))
                load.run(server.url, WARM, 0, given.ids)
                server.pause()
                servers.append(server)
            found = measure(servers, WORKLOADS, given.turns, given.ids)
    except StartError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    print("\n".join(table(found)))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
