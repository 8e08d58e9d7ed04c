"""Rounds of streams, in each of which a rank, an engine, a node's Ray or a whole machine is lost: every stream must end
with the text of the undisturbed run, and nothing may be left on any machine. The seed makes a failure reproducible."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.namespaces import Machine, Machines
from support.nodes import SMALL
from support.ray_machines import HEALTH_CHECKS, LIMIT, serve_on, short_folder, start_ray, wait_until
from support.ray_nodes import skip_without_ray
from support.remote_streams import crowd, list_leftovers, start_streams, stream_here, texts_of
from support.tiny import make_served_checkpoint

SEED = 5
ROUNDS = 30
LOSE_MACHINE = (4, 11, 18, 25)  # rounds
LOSE_RAY = (7, 14, 21, 28)
NUM_WORKERS = 2  # machines with ranks at a time; the head has none

# Prints [pid, kind] of the processes that may be killed. Those of Ray change their command lines.
LIST = """
import json, psutil
found = []
for process in psutil.process_iter(["pid", "cmdline", "name"]):
    command = process.info["cmdline"] or [""]
    if "serve_llm.engine" in command:
        found.append([process.info["pid"], "engine"])
    elif command[0].startswith("ray::RankActor"):
        found.append([process.info["pid"], "rank"])
    elif process.info["name"] == "raylet":
        found.append([process.info["pid"], "raylet"])
print(json.dumps(sorted(found)))
"""


def list_victims(machine: Machine, *kinds: str) -> list[tuple[Machine, int, str]]:
    found = json.loads(machine.run(sys.executable, "-c", LIST).stdout)
    return [(machine, pid, kind) for pid, kind in found if kind in kinds]


def is_empty(machine: Machine) -> bool:
    """Return whether Ray and the ranks are gone."""
    return not list_victims(machine, "raylet", "rank")


@pytest.mark.long
@pytest.mark.parametrize("options", [("-dp", "4", "-pp", "2"), ("-dp", "2", "-pp", "2", "--enable-expert-parallel")])
def test_chaos_over_ray(options: tuple[str, ...], tmp_path: Path) -> None:
    skip_without_ray()
    model = make_served_checkpoint(tmp_path / "model", "qwen3_moe")
    num_cpus = int(options[1]) * 2 // NUM_WORKERS
    rng = random.Random(SEED)
    bodies = crowd(max_tokens=200)
    struck: Counter[str] = Counter()
    log = tmp_path / "log"
    with Daemon(model, "--served-model-name", "demo", *SMALL) as alone:
        undisturbed = stream_here(alone.wait_until_serving(), bodies)
    with short_folder() as folder, Machines(1 + NUM_WORKERS + len(LOSE_MACHINE), private=[str(folder)]) as machines:
        head, *workers = machines
        start_ray(head, folder, 0, **HEALTH_CHECKS)
        for worker in workers[:NUM_WORKERS]:
            start_ray(worker, folder, num_cpus, head.address)
        daemon, url = serve_on(head, folder, log, *SMALL, *options, "--max-restarts", "1000000", model=model)
        first = 0  # first of the workers in the cluster
        for number in range(ROUNDS):
            current = workers[first : first + NUM_WORKERS]
            client = start_streams(head, url, bodies)
            began = time.monotonic()
            if number in LOSE_MACHINE:
                kind = "machine"
                current[0].power_off()
                first += 1
                start_ray(workers[first + NUM_WORKERS - 1], folder, num_cpus, head.address)
            else:
                kinds = ("raylet",) if number in LOSE_RAY else ("rank", "engine")
                victims = [victim for machine in (head, *current) for victim in list_victims(machine, *kinds)]
                machine, pid, kind = rng.choice([one for one in victims if one[0] is not head or one[2] == "engine"])
                machine.run("kill", "-9", str(pid))
                if kind == "raylet":
                    wait_until(partial(is_empty, machine), "the end of the node's processes")
                    start_ray(machine, folder, num_cpus, head.address)
            struck[kind] += 1
            assert texts_of(client) == undisturbed, f"round {number}: {kind}\n{log.read_text()[-8000:]}"
            print(f"\nround {number}: {kind}, {time.monotonic() - began:.0f} s", end="", flush=True)
        assert set(struck) == {"machine", "raylet", "engine", "rank"}
        print(f"\n{ROUNDS} rounds; victims: {dict(sorted(struck.items()))}")
        head.signal(daemon, signal.SIGTERM)
        assert daemon.wait(LIMIT) == 0, log.read_text()
        for machine in (head, *workers[first : first + NUM_WORKERS]):
            assert list_leftovers(machine) == "[]"
