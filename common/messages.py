"""Messages between the server and an engine process: msgspec structs in msgpack, one ZeroMQ frame each.

The server sends Start once, then Submit, Abort and Shutdown. The engine answers Start with EngineReady or Failed, then
sends one EngineCoreOutputs per step for all its requests, and Failed if it stops for a reason that it can name.

`Failed` also reports the failure of a worker to its engine and of a node to node 0 (`engine.distributed`).
"""

from __future__ import annotations

import msgspec

from serve_llm.common.errors import BY_NAME, EngineError, ServeError
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, LoRATarget, ModelInfo, SchedulerStats


class RayCluster(msgspec.Struct, frozen=True):
    """The Ray cluster that the server's process is connected to, which the engine process must join by address."""

    address: str  # host:port
    placement_group: str | None  # hex id of the placement group that the server runs in


class Start(msgspec.Struct, tag=True, frozen=True):
    options: EngineOptions
    directory: str  # the local checkpoint directory that `options.model` was resolved to
    engine: int = 0  # index of this engine, below options.data_parallel_size
    ray: RayCluster | None = None
    replaces: bool = False  # engines have already served requests: this one is a replacement or an addition
    meeting: str | None = None  # directory in which engines that step together (expert parallel) find each other


class Submit(msgspec.Struct, tag=True, frozen=True):
    requests: list[EngineCoreRequest]


class EncodedSubmit(msgspec.Struct, tag="Submit", frozen=True):
    """A Submit with requests that are already encoded."""

    requests: list[msgspec.Raw]


class MalformedRequest(msgspec.Struct, frozen=True):
    """Never sent: takes the place of a request in a Submit that cannot be decoded."""

    id: int
    error: str


class Abort(msgspec.Struct, tag=True, frozen=True):
    ids: list[int]


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """End the engine process now; open requests finish with ABORT."""


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    model_info: ModelInfo


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The sender has failed and sends nothing more. All channels use this struct: engine to server, worker to engine,
    node to node 0. Build it with `from_exception`; `to_exception` turns it back into an exception."""

    kind: str  # name of a class in `common.errors`, or of any other exception class
    message: str

    @classmethod
    def from_exception(cls, error: Exception) -> Failed:
        """Use the nearest base class of `error` that `common.errors` defines, else the class of `error` itself."""
        names = [base.__name__ for base in type(error).__mro__]
        known = next((name for name in names if name in BY_NAME), None)
        return cls(known or names[0], str(error))

    def to_exception(self, default: type[ServeError] = EngineError, prefix: str = "") -> ServeError:
        """The exception, with `prefix` before its message. A class that `common.errors` does not define becomes
        `default`, with its name before the message."""
        if self.kind in BY_NAME:
            return BY_NAME[self.kind](f"{prefix}{self.message}")
        return default(f"{prefix}{self.kind}: {self.message}")


class EngineCoreOutputs(msgspec.Struct, tag=True):
    outputs: list[EngineCoreOutput]
    stats: SchedulerStats


class AdapterCheck(msgspec.Struct, frozen=True):
    """Sent to the process that checks an adapter (`engine.lora.check`)."""

    directory: str
    targets: dict[str, LoRATarget]  # as `ModelInfo.lora_targets`
    max_rank: int
    model_directory: str  # as `ModelInfo.directory`


class AdapterVerdict(msgspec.Struct, frozen=True):
    """The reply to an AdapterCheck."""

    digest: str = ""
    error: str = ""  # why the adapter is refused


ToEngine = Start | Submit | Abort | Shutdown
FromEngine = EngineReady | Failed | EngineCoreOutputs

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


class _RequestId(msgspec.Struct, frozen=True):
    id: int


def read_to_engine(frame: bytes) -> list[ToEngine | MalformedRequest]:
    """Decode the message of a frame. If some requests of a Submit cannot be decoded, return a Submit with the others
    and a MalformedRequest for each bad one. Raises msgspec.DecodeError if not even their ids can be read."""
    try:
        return [decode_to_engine(frame)]
    except msgspec.ValidationError as error:
        try:
            encoded = msgspec.msgpack.decode(frame, type=EncodedSubmit).requests
        except msgspec.ValidationError:
            raise error from None
    requests = []
    malformed = []
    for one in encoded:
        try:
            requests.append(msgspec.msgpack.decode(one, type=EngineCoreRequest))
        except msgspec.ValidationError as error:
            malformed.append(MalformedRequest(msgspec.msgpack.decode(one, type=_RequestId).id, str(error)))
    return [Submit(requests), *malformed]
