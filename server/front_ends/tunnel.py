"""Local byte streams that continue on another host: messages between the server process and a host that has joined.

The host sends Join, the server process Welcome or Refused. The host sends Ready once it has found the checkpoint; from
then on the server process starts and ends front ends there. Each has a stream for its channel; each request that a
front end forwards has one to the server process's Unix socket. Encryption and authentication: `common.curve_zmq`.

The receiver of a stream reports how much its local connection has read (StreamRead). A `LocalStream` reads no more from
its connection while WINDOW_BYTES are in transit, so a slow reader on one host slows the writer on the other one, and
neither host buffers unread data without limit. The server process cannot wait for the channel of a front end; see
`FrontEndProcess.send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from serve_llm.server.front_ends.messages import FromFrontEnd, ToFrontEnd, compute_protocol

KEEPALIVE_SECONDS = 1.0  # interval between Keepalive messages, in both directions
LOST_SECONDS = 8.0  # time without a message after which the other side counts as lost
WINDOW_BYTES = 2**20  # maximum bytes of one stream in transit
REPORT_BYTES = WINDOW_BYTES // 4  # bytes read after which the receiver reports them


class Join(msgspec.Struct, tag=True, frozen=True):
    protocol: str  # see `compute_join_protocol`


class Welcome(msgspec.Struct, tag=True, frozen=True):
    model: str
    revision: str | None


class Refused(msgspec.Struct, tag=True, frozen=True):
    message: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The host is ready to start front ends."""

    hostname: str
    num_front_ends: int
    directory: str  # the checkpoint on that host
    server_socket: str  # path of the Unix socket on that host for requests to the server process
    ssl_keyfile: str | None
    ssl_certfile: str | None


class StartFrontEnd(msgspec.Struct, tag=True, frozen=True):
    """Start a front end. Its channel is the stream with this number."""

    stream: int
    protocol: str


class FrontEndStarted(msgspec.Struct, tag=True, frozen=True):
    stream: int
    pid: int


class Kill(msgspec.Struct, tag=True, frozen=True):
    stream: int


class Serving(msgspec.Struct, tag=True, frozen=True):
    """The first front end of the host is answering clients."""


class StreamData(msgspec.Struct, tag=True, frozen=True):
    """Positive numbers are channels of front ends, negative ones connections to the server process, each opened by the
    first data with its number. Negative numbers decrease, so late data for an ended connection opens nothing."""

    stream: int
    content: bytes


class StreamRead(msgspec.Struct, tag=True, frozen=True):
    """The receiver of a stream has read this many more bytes."""

    stream: int
    num_bytes: int


class StreamEnd(msgspec.Struct, tag=True, frozen=True):
    """reason: how the process behind the channel ended."""

    stream: int
    reason: str = ""


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The host should have no more front ends once they have drained."""


class Keepalive(msgspec.Struct, tag=True, frozen=True):
    """Shows that its sender is alive."""


FromHost = Join | Ready | FrontEndStarted | StreamData | StreamRead | StreamEnd | Leave | Keepalive
ToHost = Welcome | Refused | StartFrontEnd | Kill | Serving | StreamData | StreamRead | StreamEnd | Keepalive

encode = msgspec.msgpack.Encoder().encode
decode_from_host = msgspec.msgpack.Decoder(FromHost).decode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode


def compute_join_protocol() -> str:
    """Return a digest of all messages between a host and the server process, including those of front ends."""
    return compute_protocol((ToFrontEnd, FromFrontEnd, FromHost, ToHost))


class ReadReport:
    """Tells the sender of a stream how much of it was read."""

    def __init__(self, number: int, send: Callable[[StreamRead], None]) -> None:
        self._number = number
        self._send = send
        self._num_taken = 0  # bytes not reported to the sender yet

    def add(self, num_bytes: int) -> None:
        self._num_taken += num_bytes
        if self._num_taken >= REPORT_BYTES:
            self._send(StreamRead(self._number, self._num_taken))
            self._num_taken = 0


class LocalStream(asyncio.Protocol):
    """The local end of a stream: a connection whose bytes travel through the tunnel. It may be written to and closed
    before it is connected."""

    def __init__(self, number: int, send: Callable[[StreamData | StreamRead], None]) -> None:
        self.number = number
        self.closed = asyncio.Event()  # the connection has ended, on either side
        self._send = send
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []  # before it is connected
        self._is_closing = False
        self._num_under_way = 0  # bytes that were sent to the other host and not read there
        self._is_reading = True
        self._report = ReadReport(number, send)
        self._num_waiting = 0  # bytes written while the connection accepted none
        self._takes_more = True  # the connection accepts data

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        for data in self._unsent:
            self.write(data)
        self._unsent = []
        if self._is_closing:
            transport.close()

    def data_received(self, data: bytes) -> None:
        self._send(StreamData(self.number, data))
        self._num_under_way += len(data)
        transport = self._transport
        if self._num_under_way >= WINDOW_BYTES and self._is_reading and transport and not transport.is_closing():
            self._is_reading = False
            transport.pause_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.closed.set()

    def pause_writing(self) -> None:
        self._takes_more = False

    def resume_writing(self) -> None:
        self._takes_more = True
        self._report.add(self._num_waiting)
        self._num_waiting = 0

    def note_read(self, num_bytes: int) -> None:
        """Record that the other host has read this many bytes."""
        self._num_under_way -= num_bytes
        transport = self._transport
        if self._num_under_way < WINDOW_BYTES and not self._is_reading and transport and not transport.is_closing():
            self._is_reading = True
            transport.resume_reading()

    def write(self, data: bytes) -> None:
        """Does nothing once the connection has ended."""
        if self._transport is None:
            if not self.closed.is_set():
                self._unsent.append(data)
            return
        self._transport.write(data)
        if self._takes_more:
            self._report.add(len(data))
        else:
            self._num_waiting += len(data)

    def close(self) -> None:
        """Send the rest, then close. Idempotent."""
        self._is_closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close without sending the rest. Idempotent."""
        if self._transport is not None:
            self._transport.abort()


class StreamTransport(asyncio.Transport):
    """The transport of a protocol whose peer is on another host."""

    def __init__(self, number: int, protocol: asyncio.Protocol, send: Callable[[StreamData], None]) -> None:
        super().__init__()
        self._number = number
        self._protocol = protocol
        self._send = send
        self._num_under_way = 0  # bytes that were sent to the other host and not read there

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._num_under_way += len(data)
        self._send(StreamData(self._number, bytes(data)))

    def note_read(self, num_bytes: int) -> None:
        """Record that the other host has read this many bytes."""
        self._num_under_way -= num_bytes

    def get_write_buffer_size(self) -> int:
        return self._num_under_way

    def abort(self) -> None:
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)
