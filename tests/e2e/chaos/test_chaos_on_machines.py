"""Rounds of streams, in each of which a process or a whole machine is lost: every stream must end with the text of the
undisturbed run, and nothing may be left on any machine. The seed makes a failure reproducible."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.fleet import Fleet
from support.namespaces import Machine, Machines
from support.nodes import SMALL
from support.ray_machines import wait_until
from support.remote_streams import crowd, stream_here
from support.tiny import make_served_checkpoint

SEED = 5
ROUNDS = 30
LOSE_MACHINE = (4, 11, 18, 25)  # rounds
SPARES = len(LOSE_MACHINE)

# Prints [pid, kind] of the processes that may be killed.
LIST = """
import json, psutil
kinds = {"serve_llm.engine.distributed.worker_main": "rank", "serve_llm.engine": "engine"}
found = []
for process in psutil.process_iter(["pid", "cmdline"]):
    command = process.info["cmdline"] or []
    kind = next((kind for word, kind in kinds.items() if word in command), None)
    if "--node-rank" in command and command[command.index("--node-rank") + 1] != "0":
        kind = "node"
    if kind is not None:
        found.append([process.info["pid"], kind])
print(json.dumps(sorted(found)))
"""


def list_victims(machine: Machine) -> list[tuple[Machine, int, str]]:
    return [(machine, pid, kind) for pid, kind in json.loads(machine.run(sys.executable, "-c", LIST).stdout)]


@pytest.mark.long
@pytest.mark.parametrize("options", [("-dp", "4", "-pp", "2"), ("-dp", "2", "-pp", "2", "--enable-expert-parallel")])
def test_chaos_on_two_machines(options: tuple[str, ...], tmp_path: Path) -> None:
    model = make_served_checkpoint(tmp_path / "model", "qwen3_moe")
    rng = random.Random(SEED)
    bodies = crowd(max_tokens=200)
    struck: Counter[str] = Counter()
    with Daemon(model, "--served-model-name", "demo", *SMALL) as alone:
        undisturbed = stream_here(alone.wait_until_serving(), bodies)
    with Machines(2 + SPARES) as machines, ExitStack() as stack:
        fleet = Fleet(machines, stack, 2, *options, "--max-restarts", "1000000", model=model)
        second = 1  # number of the machine of node 1
        num_lost = 0  # count of machines and nodes
        lost = rf"supervisor.* engine {int(options[1]) - 1}: rank .* by loss of its node"
        for number in range(ROUNDS):
            client = fleet.start_streams(bodies)
            if number in LOSE_MACHINE:
                kind = "machine"
                machines[second].power_off()
                second += 1
            else:
                machine, pid, kind = rng.choice(list_victims(machines[0]) + list_victims(machines[second]))
                machine.run("kill", "-9", str(pid))
            struck[kind] += 1
            if kind in ("machine", "node"):  # the replacement is refused while this one counts as connected
                num_lost += 1
                wait_until(lambda expected=num_lost: fleet.count_logged(lost) >= expected, "the loss")
                fleet.others = [fleet.add(second, 1)]
            assert fleet.texts_of(client) == undisturbed, f"round {number}: {kind}"
        assert set(struck) == {"machine", "node", "engine", "rank"}
        print(f"\n{ROUNDS} rounds; victims: {dict(sorted(struck.items()))}")
        fleet.end()
