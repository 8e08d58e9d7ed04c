"""A Ray cluster of several nodes on this host (`ray.cluster_utils`), in a separate process.

Ray changes the process that imports it, so the test's process must not. Run as a program, this module starts the nodes,
prints the address, and answers each line on standard input with a line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
STORE_BYTES = 80_000_000


def skip_without_ray() -> None:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed (pip install '.[ray]')")


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a cluster's processes. folder: for its files; a short path, because it holds
    sockets."""
    return QUIET | {"RAY_TMPDIR": str(folder)}


class RayNodes:
    """A context manager; `address` is the head's."""

    def __init__(self, num_cpus: Sequence[int], folder: Path) -> None:
        """num_cpus: of each node, head first. Ray is told that there are as many GPUs as CPUs, and believes it."""
        skip_without_ray()
        self.environ = environment(folder)
        command = [sys.executable, str(Path(__file__)), *map(str, num_cpus)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | self.environ
        )
        self.address = self._answer()
        self.environ |= {"RAY_ADDRESS": self.address}

    def ask(self, question: str) -> Any:
        """Query the cluster. groups: the existing placement groups, as [node id of each bundle, ...]; free: total free
        CPUs."""
        assert self._process.stdin is not None
        self._process.stdin.write(question + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):  # the rest is Ray's own output
                return json.loads(line[2:])
        raise AssertionError("the Ray cluster does not start")

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(60)


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.placement_group import placement_group_table

    def say(what: object) -> None:
        print("> " + json.dumps(what), flush=True)

    cluster = Cluster()
    for count in sys.argv[1:]:
        cluster.add_node(
            num_cpus=int(count), num_gpus=int(count), object_store_memory=STORE_BYTES, include_dashboard=False
        )
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    say(cluster.address)
    for line in sys.stdin:
        if line.strip() == "groups":
            tables = [table for table in placement_group_table().values() if table["state"] == "CREATED"]
            say([[table["bundles_to_node_id"][index] for index in table["bundles"]] for table in tables])
        else:
            say(ray.available_resources().get("CPU", 0))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
