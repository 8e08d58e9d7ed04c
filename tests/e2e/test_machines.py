"""Several hosts without Ray, on machines in network namespaces: power cuts and cut cables. Limits are generous."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from serve_llm.common.errors import EngineError
from support.daemon import Daemon
from support.namespaces import Machines
from support.nodes import LIMIT, ONCE, SMALL, body

PORT = 29600

COMPLETE = """
import json, sys, urllib.request
url, body = sys.argv[1:]
request = urllib.request.Request(url + "/v1/completions", body.encode(), {"Content-Type": "application/json"})
sys.stdout.write(json.dumps([c["text"] for c in json.load(urllib.request.urlopen(request, timeout=120))["choices"]]))
"""

STREAM = """
import json, sys, urllib.request
url, body = sys.argv[1:]
body = json.dumps(json.loads(body) | {"stream": True}).encode()
request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
for line in urllib.request.urlopen(request, timeout=120):
    print(line.decode().strip(), flush=True)
"""


def node_on(machines: Machines, number: int, *options: str, rank: int) -> Daemon:
    """Start one of two nodes; node 0 is on the first machine."""
    network = ("--nnodes", "2", "--master-addr", f"{machines[0].address}:{PORT}", "--node-rank", str(rank))
    return Daemon(*options, *network, environ={"SERVE_LLM_CLUSTER_SECRET": "s3cret"}, machine=machines[number])


def on_machines(machines: Machines, stack: ExitStack, *options: str) -> tuple[Daemon, Daemon, str]:
    """Start nodes 0 and 1 on the first two machines. Yields them and the URL once they serve."""
    master = stack.enter_context(node_on(machines, 0, "demo", *SMALL, *options, "--host", "0.0.0.0", rank=0))
    follower = stack.enter_context(node_on(machines, 1, rank=1))
    url = master.wait_until_serving().replace("0.0.0.0", machines[0].address)
    return master, follower, url


@pytest.mark.slow
def test_two_machines_serve_a_third_and_a_power_cut_is_named(continuations: list[str]) -> None:
    with Machines(3) as machines, ExitStack() as stack:
        master, _, url = on_machines(machines, stack, *ONCE, "-tp", "2", "-pp", "2")
        run = machines[2].run(sys.executable, "-c", COMPLETE, url, body(), seconds=LIMIT)
        assert json.loads(run.stdout) == continuations, run.stderr
        client = machines[2].popen(sys.executable, "-c", STREAM, url, body(max_tokens=1000), stdout=subprocess.PIPE)
        assert client.stdout is not None and client.stdout.readline().startswith("data: ")
        machines[1].power_off()
        began = time.monotonic()
        assert master.wait(LIMIT) == EngineError.exit_code
        assert time.monotonic() - began < 30  # 4 s of silence, plus a busy machine's delay
        assert re.search(
            r"^serve-llm: rank 2 \(node 1, host host1 at 10\.77\.0\.2, pid \d+\) died in a step by loss of its node",
            master.log[-1],
        )
        rest, _ = client.communicate(timeout=LIMIT)
        assert "died in a step by loss of its node" in rest and rest.rstrip().endswith("data: [DONE]")


@pytest.mark.slow
def test_after_a_power_cut_a_stream_goes_on_with_another_machine() -> None:
    with Machines(4) as machines, ExitStack() as stack:
        master, _, url = on_machines(machines, stack, "-tp", "2", "-pp", "2")
        long = body(prompt="import", max_tokens=300, seed=3, temperature=1)
        undisturbed = json.loads(machines[3].run(sys.executable, "-c", COMPLETE, url, long, seconds=LIMIT).stdout)
        client = machines[3].popen(sys.executable, "-c", STREAM, url, long, stdout=subprocess.PIPE)
        assert client.stdout is not None
        first = client.stdout.readline()
        machines[1].power_off()
        master.wait_until_logged("died in a step by loss of its node.*; it is replaced")
        stack.enter_context(node_on(machines, 2, rank=1))
        *events, end = re.findall("^data: (.+)$", first + client.communicate(timeout=LIMIT)[0], re.MULTILINE)
        assert end == "[DONE]" and ["".join(json.loads(event)["choices"][0]["text"] for event in events)] == undisturbed


@pytest.mark.slow
def test_a_tensor_group_over_machines_and_a_cut_cable(continuations: list[str]) -> None:
    with Machines(3) as machines, ExitStack() as stack:
        master, follower, url = on_machines(machines, stack, *ONCE, "-tp", "4")
        run = machines[2].run(sys.executable, "-c", COMPLETE, url, body(), seconds=LIMIT)
        assert json.loads(run.stdout) == continuations, run.stderr
        assert any("crosses hosts (10.77.0.1, 10.77.0.2)" in line for line in master.log)
        machines[1].unplug()
        assert follower.wait(LIMIT) == EngineError.exit_code and "node 0 is lost" in follower.log[-1]
        assert master.wait(LIMIT) == EngineError.exit_code
        assert re.search(
            r"rank 2 \(node 1, host host1 at 10\.77\.0\.2.* died in a step by loss of its node", master.log[-1]
        )
