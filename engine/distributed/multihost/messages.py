"""Messages between node 0 and the other nodes of a service: msgspec structs in msgpack over CurveZMQ.

A node sends FindEngines to the address that all hosts know, and an engine of node 0 answers NodeEngines. The node then
connects to each of these engines. There it sends JoinRequest, and the engine answers RunRanks. The node then sends a
NodeReport every second and when a rank ends, or Failed if it cannot go on. The engine sends EngineServing once, and
EndNode. Nodes that are not admitted get JoinRefused. Messages of the ranks themselves are in
`engine.distributed.messages`.
"""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec

from serve_llm.common.errors import OptionError
from serve_llm.common.messages import Failed
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.options.fields import option_name


class FindEngines(msgspec.Struct, tag=True, frozen=True):
    node: int
    nnodes: int
    host: str
    address: str


class NodeEngines(msgspec.Struct, tag=True, frozen=True):
    """The data-parallel engines that have ranks on the node."""

    ports: dict[int, int]  # engine -> where it waits for JoinRequest


class JoinRequest(msgspec.Struct, tag=True, frozen=True):
    engine: int
    node: int
    host: str
    address: str


class RankStatus(msgspec.Struct, array_like=True, frozen=True):
    """A rank's process."""

    pid: int
    state: str  # see `LaunchedWorkers.state`
    ended: str  # how it ended; "" while it runs


class NodeReport(msgspec.Struct, tag=True, frozen=True):
    ranks: dict[int, RankStatus]


class RunRanks(msgspec.Struct, tag=True, frozen=True):
    ranks: list[int]  # ranks of the engine that replies
    on_gpus: bool  # one GPU per rank
    options: EngineOptions  # node 0's options, without secrets
    url: str  # where ranks send WorkerHello


class JoinRefused(msgspec.Struct, tag=True, frozen=True):
    reason: str


class EngineServing(msgspec.Struct, tag=True, frozen=True):
    """An engine is ready. If it dies from now on, options and model are not to blame: node 0 starts another engine, and
    the node may join again."""


class EndNode(msgspec.Struct, tag=True, frozen=True):
    cause: str  # "" on an orderly shutdown


FromNode = FindEngines | JoinRequest | NodeReport | Failed
ToNode = NodeEngines | RunRanks | JoinRefused | EngineServing | EndNode

encode = msgspec.msgpack.Encoder().encode
decode_from_node = msgspec.msgpack.Decoder(FromNode).decode
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode

# Options that may differ between nodes, or are compared in another way.
_PER_NODE = {"node_rank", "host_ip", "log_level", "log_format", "download_dir"}


def without_secrets(options: EngineOptions) -> EngineOptions:
    return replace(options, cluster_secret=None)


def check_options_match(here: EngineOptions, first: EngineOptions) -> None:
    """Raise OptionError for the first option that is given on this node and differs from node 0's."""
    for option in fields(EngineOptions):
        own = getattr(here, option.name)
        other = getattr(first, option.name)
        unsaid = "" if option.name == "model" else option.default
        if option.metadata.get("secret") or option.name in _PER_NODE or own in (unsaid, other):
            continue
        name = "the model" if option.name == "model" else f"--{option_name(option)}"
        raise OptionError(f"node {here.node_rank} was started with {name} {own}, node 0 with {other}")
