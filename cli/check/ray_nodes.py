"""The hosts of `serve-llm check --ray`: a Ray task on each other node of the cluster joins node 0, which is this host.

Ray only starts the tasks; they join over the same channel as with --nnodes. Ray is imported on use, because it may not
be installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from serve_llm.cli.check.session import CheckedHost, follow
from serve_llm.common.errors import OptionError


class CheckRayCluster:
    """The cluster that this host belongs to. A context manager."""

    def __init__(self) -> None:
        """Raises OptionError if Ray is not installed, or this host belongs to no cluster."""
        try:
            ray = _import("ray")
        except ImportError:
            raise OptionError("--ray: Ray is not installed; pip install '.[ray]' in the repository") from None
        try:
            ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
        except Exception as error:  # ConnectionError, and RuntimeError for another version of Ray or Python
            reason = " ".join(str(error).split())
            raise OptionError(f"--ray: {reason}; start one with `ray start` on each host") from None
        own_id = ray.get_runtime_context().get_node_id()
        # Node 0 is this host; the others follow in an order that is the same in every run.
        self._nodes = sorted(
            (node for node in ray.nodes() if node["Alive"]),
            key=lambda node: (node["NodeID"] != own_id, node["NodeManagerAddress"], node["NodeID"]),
        )
        self._tasks: dict[int, Any] = {}

    @property
    def address(self) -> str:
        """The address by which the cluster knows this host."""
        return str(self._nodes[0]["NodeManagerAddress"])

    @property
    def size(self) -> int:
        return len(self._nodes)

    def __enter__(self) -> CheckRayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        _import("ray").shutdown()  # also ends the tasks

    def start_nodes(self, port: int, model: str | None, seconds: float, secret: str) -> None:
        """Start the check on every other node; each joins this host at `port`."""
        ray = _import("ray")
        strategies = _import("ray.util.scheduling_strategies")
        for rank, node in enumerate(self._nodes):
            if rank == 0:
                continue
            strategy = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            run = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(_run_node)
            own_address = node["NodeManagerAddress"]
            self._tasks[rank] = run.remote(rank, own_address, model, self.address, port, self.size, seconds, secret)

    def explain_absence(self, rank: int, seconds: float) -> str:
        """Why a node has not joined."""
        ray = _import("ray")
        name = f"node {rank} ({self._nodes[rank]['NodeManagerHostname']})"
        reason = f"has not joined within {seconds:g} s of Ray being asked to start the check there"
        try:
            ray.get(self._tasks[rank], timeout=0)
        except ray.exceptions.GetTimeoutError:
            pass
        except ray.exceptions.RayError as error:
            last_line = str(error).strip().splitlines()[-1]  # the exception of the remote traceback
            reason = f"Ray's task there failed: {last_line}"
        return f"{name}: {reason}; run the check with --nnodes on all hosts, which needs no Ray; see `ray status`"


def _run_node(
    rank: int, address: str, model: str | None, master: str, port: int, nnodes: int, seconds: float, secret: str
) -> None:
    with CheckedHost(rank, address, model) as host:
        follow(host, master, port, nnodes, seconds, secret)


def _import(name: str) -> Any:
    """A Ray module, untyped: Ray may be missing where types are checked."""
    return import_module(name)
