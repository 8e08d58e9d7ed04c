"""Local byte streams that continue on another host: messages between the server process and a host that has joined.

The host sends Join, the server process Welcome or Refused. The host sends Ready once it has found the checkpoint; from
then on the server process starts and ends front ends there. Each has a stream for its channel; each request that a
front end forwards has one to the server process's Unix socket. Encryption and authentication: `common.curve_zmq`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

BEAT_SECONDS = 1.0  # between two Beat messages, in both directions
LOST_SECONDS = 8.0  # without a message, after which the other side counts as lost


class Join(msgspec.Struct, tag=True, frozen=True):
    protocol: str  # see `compute_protocol`


class Welcome(msgspec.Struct, tag=True, frozen=True):
    model: str
    revision: str | None


class Refused(msgspec.Struct, tag=True, frozen=True):
    message: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The host takes front ends."""

    hostname: str
    num_front_ends: int
    directory: str  # the checkpoint on that host
    server_socket: str  # path of the Unix socket on that host for requests to the server process
    ssl_keyfile: str | None
    ssl_certfile: str | None


class StartFrontEnd(msgspec.Struct, tag=True, frozen=True):
    """Start a front end, whose channel is the stream of this number."""

    stream: int
    protocol: str


class FrontEndStarted(msgspec.Struct, tag=True, frozen=True):
    stream: int
    pid: int


class Kill(msgspec.Struct, tag=True, frozen=True):
    stream: int


class Serving(msgspec.Struct, tag=True, frozen=True):
    """The first front end of the host answers clients."""


class StreamData(msgspec.Struct, tag=True, frozen=True):
    """Positive numbers are channels of front ends, negative ones connections to the server process, which the first
    data of a number opens. These numbers decrease: what comes late for one that has ended opens nothing."""

    stream: int
    content: bytes


class StreamEnd(msgspec.Struct, tag=True, frozen=True):
    """reason: how the process ended whose channel it was."""

    stream: int
    reason: str = ""


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The host shall have no front ends any more, once they have drained."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """A sign of life."""


FromHost = Join | Ready | FrontEndStarted | StreamData | StreamEnd | Leave | Beat
ToHost = Welcome | Refused | StartFrontEnd | Kill | Serving | StreamData | StreamEnd | Beat

encode = msgspec.msgpack.Encoder().encode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode


class LocalStream(asyncio.Protocol):
    """The local end of a stream: a connection whose bytes travel through the tunnel. It may be written to and closed
    before it is connected."""

    def __init__(self, number: int, send: Callable[[StreamData], None]) -> None:
        self.number = number
        self.closed = asyncio.Event()  # the connection has ended, on either side
        self._send = send
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []  # before it is connected
        self._is_closing = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.writelines(self._unsent)
        self._unsent = []
        if self._is_closing:
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._send(StreamData(self.number, data))

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.closed.set()

    def write(self, data: bytes) -> None:
        """Does nothing once the connection has ended."""
        if self._transport is not None:
            self._transport.write(data)
        elif not self.closed.is_set():
            self._unsent.append(data)

    def close(self) -> None:
        """Send what is left, then close. Idempotent."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()


class StreamTransport(asyncio.Transport):
    """What a protocol writes to a stream whose other end is on another host."""

    def __init__(self, number: int, send: Callable[[StreamData], None]) -> None:
        super().__init__()
        self._number = number
        self._send = send

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._send(StreamData(self._number, bytes(data)))
