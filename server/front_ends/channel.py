"""Messages of any length, in both directions, over a connected local socket. It closes when the peer ends."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

_LENGTH = struct.Struct(">I")  # precedes each message: its length in bytes


class MessageChannel(asyncio.Protocol):
    """Pass it to `loop.create_unix_connection(..., sock=...)`. Sends never block, so the sender must
    watch `num_unread_bytes`."""

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        """receive: called in the event loop with each message."""
        self._receive = receive
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self.closed = asyncio.Event()  # no message will be sent or received any more

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        start = 0
        size = len(self._unread)
        while size - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread, start)
            end = start + _LENGTH.size + length
            if end > size:
                break
            self._receive(bytes(memoryview(self._unread)[start + _LENGTH.size : end]))
            start = end
        if start:
            del self._unread[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.closed.set()

    def send(self, message: bytes) -> None:
        """Does nothing once the peer is gone."""
        if self._transport is not None:
            self._transport.write(_LENGTH.pack(len(message)) + message)

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of messages that the peer has not read, excluding those buffered by the operating system."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close without sending the rest. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Send the rest, then close. Idempotent."""
        if self._transport is not None:
            self._transport.close()
