"""From the HTTP request to bytes, from a generation to the HTTP reply; both ends of an exchange on plain ASGI.

A client that goes away aborts its generation at once, in every phase: `receive` is watched as long as the reply runs.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_llm.server.admission import Applicant
from serve_llm.server.errors import RequestError, TooLarge, Unsupported
from serve_llm.server.generate import Generation
from serve_llm.server.prompt.jobs import Generate
from serve_llm.server.reply.body import body
from serve_llm.server.reply.shape import Head, Shape
from serve_llm.server.reply.sse import Events
from serve_llm.server.routes.service import Caller, Service

Result = TypeVar("Result", bound=msgspec.Struct)

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


async def run_job(
    service: Service, request: Request, kind: str, result: type[Result], deadline: float | None = None
) -> Result:
    """Reads the body and does the job (`prompt.jobs`) with it. Raises RequestError."""
    service.gate.check()
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise Unsupported(f"Content-Encoding {encoding} is not supported: send the body as it is", "Content-Encoding")
    with service.bodies.reading() as take:
        chunks, size, limit = [], 0, service.limits.body_bytes
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise TooLarge(f"the body is longer than {limit} bytes")
            take(len(chunk))
            chunks.append(chunk)
        return await service.prompts.run(kind, b"".join(chunks), result, deadline)


class GenerationResponse(Response):
    """Runs a generation and sends what it brings, as one body or as events."""

    def __init__(self, service: Service, caller: Caller, made: Generate, shape: Shape, head: Head) -> None:
        super().__init__()
        self._gate = service.gate
        self._generation = service.generator.open(
            made.request, caller.arrival, tenant=caller.tenant, deadline=caller.deadline
        )
        self._shape = shape
        self._head = head
        self._made = made

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError before anything is sent; after that an error is the stream's last event."""
        generation = self._generation
        applicant = Applicant(
            tenant=generation.tenant,
            priority=generation.request.priority,
            num_requests=len(generation.choices),
            num_tokens=sum(map(len, generation.request.prompts)),
            max_tokens=max(sampling.max_tokens for sampling in generation.request.samplings),
            deadline=generation.deadline,
        )
        with self._gate.admit(applicant, generation.fail) as ticket, generation:
            generation.on_begin = ticket.began
            watch = asyncio.create_task(_close_on_leave(receive, generation))
            seconds = ticket.seconds_to_begin()
            timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, ticket.expire)
            try:
                # In a task of its own, because each wake-up goes through all coroutines that wait for each other: under
                # this one are a dozen of the framework's, which cost a third of a token's time.
                await asyncio.create_task(self._send_events(send) if self._made.stream else self._send_body(send))
            finally:
                watch.cancel()
                if timer is not None:
                    timer.cancel()
                ticket.is_whole = generation.is_whole
                ticket.num_generated = generation.counts().completion // len(generation.choices)

    async def _send_body(self, send: Send) -> None:
        deltas = await self._generation.whole()
        if not self._generation.closed:
            content = await body(self._shape, self._head, deltas, self._generation.counts())
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})

    async def _send_events(self, send: Send) -> None:
        generation = self._generation
        continuous = self._made.continuous_usage
        events = Events(self._shape, self._head, self._made.include_usage, continuous)
        deltas = await generation.next()
        if generation.closed:
            return
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        try:
            while deltas:
                content = await events.encode(deltas, generation.counts() if continuous else None)
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
