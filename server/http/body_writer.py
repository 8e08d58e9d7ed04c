"""Writes parts of a body directly to the connection, because passing a token through the middleware's coroutines would
double its cost."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

BODY_WRITER = "serve_llm.body_writer"  # key in the ASGI scope: the BodyWriter of the response; absent without a socket


class BodyWriter:
    """Writes to a response whose start and first part were sent by ASGI's `send`, which must also send its last
    part."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @property
    def is_ready(self) -> bool:
        """Whether the client keeps up with the writes. If not, `send` waits for it."""
        return not self._flow.write_paused

    def write(self, content: bytes) -> None:
        """Write a part of the body, which may be empty. Does nothing if the client is gone."""
        cycle = self._cycle
        if content and not cycle.disconnected:
            self._write(b"%x\r\n%b\r\n" % (len(content), content) if cycle.chunked_encoding else content)

    def write_framed(self, before: bytes, content: bytes, after: bytes) -> None:
        """Write the three as one part, which is copied once. Does nothing if the client is gone."""
        cycle = self._cycle
        if cycle.disconnected:
            return
        if cycle.chunked_encoding:
            size = len(before) + len(content) + len(after)
            self._write(b"%x\r\n%b%b%b\r\n" % (size, before, content, after))
        else:
            self._write(before + content + after)
