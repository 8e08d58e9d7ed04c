"""From the HTTP request to bytes, from a generation to the HTTP reply; both ends of an exchange on plain ASGI.

A client that goes away aborts its generation at once, in every phase: `receive` is watched as long as the reply runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_llm.server.admission import Gate
from serve_llm.server.errors import RequestError, TooLarge
from serve_llm.server.generate import Generation
from serve_llm.server.reply.body import body
from serve_llm.server.reply.shape import Head, Shape
from serve_llm.server.reply.sse import Events
from serve_llm.server.schema.common import SamplingBody, StreamOptions

T = TypeVar("T")

MAX_BODY_BYTES = 16 * 2**20
_LONG = 4096  # characters: about a millisecond of tokenizing, for which the event loop may stand still

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


async def read_body(request: Request) -> bytes:
    """The request's body. Raises TooLarge."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise TooLarge(f"the body is longer than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


async def off_loop(num_characters: int, work: Callable[[], T]) -> T:
    """`work()` on so much text: here if it is short, else in a thread, so that the streams go on."""
    return work() if num_characters <= _LONG else await asyncio.to_thread(work)


class GenerationResponse(Response):
    """Runs a generation and sends what it brings, as one body or as events."""

    def __init__(self, gate: Gate, generation: Generation, shape: Shape, head: Head, requested: SamplingBody) -> None:
        super().__init__()
        self._gate = gate
        self._generation = generation
        self._shape = shape
        self._head = head
        self._is_stream = bool(requested.stream)
        self._options = requested.stream_options or StreamOptions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError before anything is sent; after that an error is the stream's last event."""
        with self._gate, self._generation as generation:
            watch = asyncio.create_task(_close_on_leave(receive, generation))
            try:
                # In a task of its own, because each wake-up goes through all coroutines that wait for each other: under
                # this one are a dozen of the framework's, which cost a third of a token's time.
                await asyncio.create_task(self._send_events(send) if self._is_stream else self._send_body(send))
            finally:
                watch.cancel()

    async def _send_body(self, send: Send) -> None:
        deltas = await self._generation.whole()
        if not self._generation.closed:
            content = body(self._shape, self._head, deltas, self._generation.counts())
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})

    async def _send_events(self, send: Send) -> None:
        generation = self._generation
        continuous = bool(self._options.continuous_usage_stats)
        events = Events(self._shape, self._head, bool(self._options.include_usage), continuous)
        deltas = await generation.next()
        if generation.closed:
            return
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        try:
            while deltas:
                content = events.encode(deltas, generation.counts() if continuous else None)
                if content:
                    await send({"type": "http.response.body", "body": content, "more_body": True})
                deltas = await generation.next()
            last = events.end(generation.counts())
        except RequestError as error:
            last = events.error(error)
        await send({"type": "http.response.body", "body": last})


async def _close_on_leave(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()
