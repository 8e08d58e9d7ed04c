"""Messages between the server process, which owns the engines, and its front end processes: msgspec structs in msgpack.

A front end gets Setup, answers Loaded, gets Activate when it should answer clients, and Drain when it should end. For
each generation it sends Open, aborts, and Close; the server process sends outputs, and Rejected if the generation was
not admitted or has to end.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from serve_llm.common.options.schema import Options
from serve_llm.common.types import Adapter, EngineCoreOutput, EngineCoreRequest, ModelInfo
from serve_llm.server.admission.recent_requests import RequestLabel
from serve_llm.server.admission.throughput import Pace
from serve_llm.server.engines.tracked_request import Replay
from serve_llm.server.http import errors
from serve_llm.server.http.errors import RequestError, Unavailable
from serve_llm.server.metrics.http_meter import HttpCounts
from serve_llm.server.metrics.meter import MeterCounts


class Setup(msgspec.Struct, tag=True, frozen=True):
    options: Options
    directory: str  # the local checkpoint
    model_info: ModelInfo
    num_engines: int
    number: int  # counts front end processes since the server started, from 1
    server_socket: str  # path of the Unix socket on which the server process answers HTTP
    start_time: int  # Unix seconds, of the server
    clock_time: float | None  # the server process's clock when this was sent; None: the front end shares that clock


class Adapters(msgspec.Struct, tag=True, frozen=True):
    """The adapters that requests can currently name."""

    version: int  # increases with every change
    adapters: dict[str, Adapter]


class Activate(msgspec.Struct, tag=True, frozen=True):
    """Accept connections."""


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Accept no more connections, and end when the open ones have ended, or after `seconds`."""

    seconds: float


class CollectCounts(msgspec.Struct, tag=True, frozen=True):
    number: int  # `Counts` repeats it


class EngineState(msgspec.Struct, tag=True, frozen=True):
    obstacle: str | None  # see `AdmissionController.obstacle`
    outage: str | None  # see `Dispatcher.outage`
    pace: Pace


class RelayedOutputs(msgspec.Struct, tag=True, frozen=True):
    """Outputs of one engine, with ids assigned by the front end."""

    engine: int
    outputs: list[EngineCoreOutput]


class Replays(msgspec.Struct, tag=True, frozen=True):
    """How often a request was interrupted. Sent before its last output."""

    request_id: int
    replays: list[Replay]


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """A generation ends with an error. was_admitted: it had been admitted."""

    generation: int
    was_admitted: bool
    kind: str  # the name of a class of `server.http.errors`
    message: str
    retry_after: int | None  # set for Unavailable

    @classmethod
    def from_exception(cls, generation: int, error: RequestError, *, was_admitted: bool) -> Rejected:
        retry_after = error.retry_after if isinstance(error, Unavailable) else None
        return cls(generation, was_admitted, type(error).__name__, error.message, retry_after)

    def to_exception(self) -> RequestError:
        kind: type[RequestError] = getattr(errors, self.kind)
        if self.retry_after is not None:
            return Unavailable(self.message, retry_after=self.retry_after)
        return kind(self.message)


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The front end can be activated."""


class Open(msgspec.Struct, tag=True, frozen=True):
    """Admit and submit a generation. All fields except `requests` are those of `AdmissionRequest`.

    requests: later choices of a prompt have no prompt_ids, because the first one has them.
    """

    generation: int
    tenant: int
    priority: int
    max_tokens: int
    deadline: float | None
    label: RequestLabel
    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, tag=True, frozen=True):
    ids: list[int]


class Close(msgspec.Struct, tag=True, frozen=True):
    """The generation has ended. See `Dispatcher.release`."""

    generation: int
    num_generated: int
    is_whole: bool


class Counts(msgspec.Struct, tag=True, frozen=True):
    """What the front end has counted since its last message of this kind. Sent every second, also as a heartbeat."""

    number: int  # number of the CollectCounts that it answers; 0: none
    meters: list[MeterCounts]  # per engine
    refused: dict[str, int]
    ignored_fields: dict[str, int]
    http: HttpCounts


class AdaptersKnown(msgspec.Struct, tag=True, frozen=True):
    version: int


ToFrontEnd = Setup | Adapters | Activate | Drain | CollectCounts | EngineState | RelayedOutputs | Replays | Rejected
FromFrontEnd = Loaded | Open | AbortRequests | Close | Counts | AdaptersKnown

encode = msgspec.msgpack.Encoder().encode
decode_to_front_end = msgspec.msgpack.Decoder(ToFrontEnd).decode
decode_from_front_end = msgspec.msgpack.Decoder(FromFrontEnd).decode


def compute_protocol(unions: tuple[Any, ...] = (ToFrontEnd, FromFrontEnd)) -> str:
    """A digest of all messages. After an upgrade, a front end of another version may not understand the server."""
    schemas, components = msgspec.json.schema_components(unions)
    return hashlib.sha256(msgspec.json.encode((schemas, components), order="sorted")).hexdigest()
