"""Messages between the server's client and an engine process: msgspec structs in msgpack, one ZeroMQ frame each.

Server to engine: Start once, then Submit, Abort, Shutdown. Engine to server: Ready or Failed once, then one Step per
engine step for all its requests, Failed if the engine dies of something it can still name.
"""

from __future__ import annotations

import msgspec

from serve_llm.engine.options import Options
from serve_llm.engine.types import ModelFacts, Output, Request, Stats


class RayCluster(msgspec.Struct, frozen=True):
    """The Ray cluster that the server's process is connected to. An engine, another process, cannot see it."""

    address: str  # host:port
    placement_group: str | None  # id in hex, of the one that the server runs in


class Start(msgspec.Struct, tag=True, frozen=True):
    options: Options
    directory: str  # the local checkpoint directory that `options.model` was resolved to
    engine: int = 0  # index among the options.data_parallel_size engines
    ray: RayCluster | None = None
    replaces: bool = False  # another engine, which has served
    meeting: str | None = None  # directory where engines that make their steps together find each other


class Submit(msgspec.Struct, tag=True, frozen=True):
    requests: list[Request]


class Abort(msgspec.Struct, tag=True, frozen=True):
    ids: list[int]


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """End the engine process now; whatever is open ends with ABORT."""


class Ready(msgspec.Struct, tag=True, array_like=True, frozen=True):
    facts: ModelFacts


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    kind: str  # a class name of `errors.BY_NAME`
    message: str


class Step(msgspec.Struct, tag=True, array_like=True):
    outputs: list[Output]
    stats: Stats


ToEngine = Start | Submit | Abort | Shutdown
FromEngine = Ready | Failed | Step

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
