"""Sends one streamed completion and records when each chunk arrives.

It shares the cores with the server, so it does little work: httptools splits the reply and msgspec reads the few
required fields.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

REQUEST_SECONDS = 600.0


class StreamUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class StreamDelta(msgspec.Struct):
    """What a chat completion may stream; empty chunks are not tokens."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class StreamChoice(msgspec.Struct):
    delta: StreamDelta | None = None  # None in /v1/completions

    @property
    def has_tokens(self) -> bool:
        delta = self.delta
        return delta is None or bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


class StreamEvent(msgspec.Struct):
    """The fields of an event that are read."""

    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(StreamEvent).decode


class EventSplitter:
    """Extracts server-sent events from chunks of a body: `feed` returns the data of each complete event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass
class TimedReply:
    """The outcome of one request. Times are those of `time.perf_counter`."""

    began: float
    ended: float = 0.0
    times: list[float] = field(default_factory=list)  # when each event with tokens arrived
    usage: StreamUsage | None = None
    error: str | None = None


class _StreamProtocol(asyncio.Protocol):
    """One request on its own connection; `done` is set when the reply is complete or the connection is lost."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._parser = httptools.HttpResponseParser(self)
        self._events = EventSplitter()
        self._failure = b""
        self.reply = TimedReply(time.perf_counter())
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, msgspec.MsgspecError) as error:
            self.reply.error = f"what the server sent cannot be read: {error}"
            self._end()

    def on_body(self, piece: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._failure += piece
            return
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self._end()
                return
            event = _decode(data)
            if event.choices and event.choices[0].has_tokens:
                self.reply.times.append(self._now)
            self.reply.usage = event.usage or self.reply.usage
            if event.error is not None:
                self.reply.error = str(event.error)

    def on_message_complete(self) -> None:
        if self.reply.usage is not None and not self.done.done():  # transformers sends no [DONE]
            self._end()
        self._break_off("the reply ended without [DONE]")

    def connection_lost(self, error: Exception | None) -> None:
        self._break_off(f"the server closed the connection: {error}")

    def _break_off(self, why: str) -> None:
        """Note why the reply ended; ignored after [DONE]."""
        if self.done.done():
            return
        if self._failure:
            why = f"status {self._parser.get_status_code()}: {self._failure.decode(errors='replace')[:300]}"
        self.reply.error = self.reply.error or why
        self._end()

    def _end(self) -> None:
        self.reply.ended = time.perf_counter()
        if not self.done.done():
            self.done.set_result(None)
        self._transport.close()


class StreamClient:
    """A server's URL, which may use https and have a path."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None, f"{url} names no host"
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        self._headers = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def send(self, path: str, body: Mapping[str, object]) -> TimedReply:
        """Errors, including an unreachable server, are in the reply."""
        data = json.dumps(body).encode()
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"{self._headers}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        message = head.encode() + data
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        try:
            _, protocol = await loop.create_connection(
                lambda: _StreamProtocol(message), self._host, self._port, ssl=self._tls
            )
            await asyncio.wait_for(protocol.done, REQUEST_SECONDS)
        except (OSError, TimeoutError) as error:
            return TimedReply(began, time.perf_counter(), error=f"{type(error).__name__}: {error}")
        protocol.reply.began = began
        return protocol.reply
