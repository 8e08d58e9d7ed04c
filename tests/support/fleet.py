"""A server with engines on several machines in network namespaces, without Ray."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

from support.daemon import Daemon
from support.namespaces import Machine, Machines
from support.nodes import LIMIT, SMALL
from support.remote_streams import list_leftovers, start_streams, texts_of

PORT = 29600


def node_on(machine: Machine, master: Machine, nnodes: int, rank: int, *options: str) -> Daemon:
    network = ("--nnodes", str(nnodes), "--master-addr", f"{master.address}:{PORT}", "--node-rank", str(rank))
    return Daemon(*options, *network, environ={"SERVE_LLM_CLUSTER_SECRET": "s3cret"}, machine=machine)


class Fleet:
    """A node on each of the first machines; node 0 serves."""

    def __init__(self, machines: Machines, stack: ExitStack, nnodes: int, *options: str, model: str = "demo") -> None:
        self._machines, self._stack, self._nnodes = machines, stack, nnodes
        self.first = self.add(0, 0, model, "--served-model-name", "demo", *SMALL, *options, "--host", "0.0.0.0")
        self.others = [self.add(rank, rank) for rank in range(1, nnodes)]
        self.url = self.first.wait_until_serving().replace("0.0.0.0", machines[0].address)

    def add(self, machine: int, rank: int, *options: str) -> Daemon:
        return self._stack.enter_context(
            node_on(self._machines[machine], self._machines[0], self._nnodes, rank, *options)
        )

    def start_streams(self, bodies: list[dict[str, Any]]) -> subprocess.Popen[str]:
        """Start the streams. Returns once all have begun."""
        return start_streams(self._machines[0], self.url, bodies)

    def texts_of(self, client: subprocess.Popen[str]) -> list[str]:
        """Return the texts of streams from `start_streams`."""
        try:
            return texts_of(client)
        except subprocess.TimeoutExpired:
            logs = ["\n".join(node.log[-40:]) for node in (self.first, *self.others)]
            raise AssertionError("the streams do not end:\n" + "\n--\n".join(logs)) from None

    def count_logged(self, pattern: str) -> int:
        """Count the lines in node 0's log that match the pattern."""
        return sum(re.search(pattern, line) is not None for line in list(self.first.log))

    def samples(self, name: str) -> dict[str, float]:
        """Return engine -> a sample of /metrics."""
        script = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
        lines = self._machines[0].run(sys.executable, "-c", script, self.url + "/metrics").stdout.splitlines()
        found = [line for line in lines if line.startswith(f"serve_llm_{name}{{")]
        return {line.split('engine="')[1].split('"')[0]: float(line.rpartition(" ")[2]) for line in found}

    def end(self) -> None:
        """Shut down; assert that nothing is left on any machine."""
        self.first.signal(signal.SIGTERM)
        nodes = [self.first, *(node for node in self.others if node.process.poll() is None)]
        assert [node.wait(LIMIT) for node in nodes] == [0] * len(nodes), [node.log[-3:] for node in nodes]
        for machine in self._machines:
            if machine.on:
                assert list_leftovers(machine) == "[]"
