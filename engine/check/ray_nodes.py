"""The hosts of a check when Ray starts them: one actor on each node of the cluster, node 0 here.

Takes the place of `join`: `RayGathering` as `Gathering`, `RayChannel` as `Channel`. Messages are JSON as over a socket,
so that hosts with other versions of serve-llm can say so. Imports ray only when it is used; it may not be installed.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any, TypeVar

import msgspec

from serve_llm.engine.check.host import HostReport
from serve_llm.engine.check.session import Node, Task
from serve_llm.engine.errors import EngineError, OptionError

T = TypeVar("T")


class NodeActor:
    """A `Node` inside a Ray actor."""

    def __init__(self, rank: int, address: str, model: str | None) -> None:
        self._node = Node(rank, address, model)

    def report(self) -> bytes:
        return msgspec.json.encode(self._node.report)

    def do(self, task: bytes) -> bytes:
        return msgspec.json.encode(self._node.do(msgspec.json.decode(task, type=Task)))


class RayChannel:
    """See `join.Channel`. What is sent is a task for the actor, what is received its answer."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self._name = actor, name
        self._answer: Any = None

    def send(self, message: msgspec.Struct) -> None:
        self._answer = self._actor.do.remote(msgspec.json.encode(message))

    def receive(self, kind: type[T], seconds: float) -> T:
        return _get(self._answer, kind, seconds, self._name)


class RayGathering:
    """See `join.Gathering`: the nodes of the cluster that this host is connected to, with their actors."""

    def __init__(self, model: str | None, seconds: float) -> None:
        """Raises OptionError if there is no Ray, no cluster, or this host is no node of it."""
        try:
            ray = _module("ray")
        except ImportError:
            raise OptionError("--ray: Ray is not installed; pip install 'serve-llm[ray]'") from None
        try:
            ray.init(address="auto", logging_level="ERROR", log_to_driver=False)
        except Exception as error:  # ConnectionError, and RuntimeError for another version of Ray or Python
            raise OptionError(
                f"--ray: {' '.join(str(error).split())}; start one with `ray start` on each host"
            ) from None
        self._model, self._seconds = model, seconds
        own = ray.get_runtime_context().get_node_id()
        alive = [node for node in ray.nodes() if node["Alive"]]
        # Node 0 is this host, the others follow in an order that does not change from run to run.
        alive.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"], node["NodeID"]))
        self._cluster = alive
        self.nodes: dict[int, tuple[HostReport, RayChannel]] = {}

    @property
    def address(self) -> str:
        """This host's, by which the cluster knows it."""
        return str(self._cluster[0]["NodeManagerAddress"])

    def __enter__(self) -> RayGathering:
        return self

    def __exit__(self, *_: object) -> None:
        _module("ray").shutdown()  # ends the actors as well

    def wait(self) -> dict[int, str]:
        """See `Gathering.wait`."""
        ray, strategies = _module("ray"), _module("ray.util.scheduling_strategies")
        actors = {}
        for rank, node in list(enumerate(self._cluster))[1:]:
            there = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            kind = ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=there)(NodeActor)
            actors[rank] = kind.remote(rank, node["NodeManagerAddress"], self._model)
        deadline = time.monotonic() + self._seconds
        absent = {}
        for rank, actor in actors.items():
            name = f"node {rank} ({self._cluster[rank]['NodeManagerHostname']})"
            try:
                report = _get(actor.report.remote(), HostReport, deadline - time.monotonic(), name)
            except EngineError as error:
                absent[rank] = (
                    f"{error}; run the check with --nnodes on all hosts, which needs no Ray; see `ray status`"
                )
            else:
                self.nodes[rank] = report, RayChannel(actor, name)
        return absent


def _module(name: str) -> Any:
    """Of Ray. Untyped, because it may not be there when types are checked either."""
    return import_module(name)


def _get(answer: Any, kind: type[T], seconds: float, name: str) -> T:
    ray = _module("ray")
    try:
        return msgspec.json.decode(ray.get(answer, timeout=max(0.0, seconds)), type=kind)
    except ray.exceptions.GetTimeoutError:
        raise EngineError(f"{name}: no answer from Ray's actor there within the limit") from None
    except (ray.exceptions.RayError, msgspec.DecodeError) as error:
        last = str(error).strip().splitlines()[-1:]  # of a remote traceback
        raise EngineError(f"{name}: Ray's actor there fails: {' '.join(last)}") from None
