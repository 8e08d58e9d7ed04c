"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_llm.server.generate.delta import Delta, TokenCounts
from serve_llm.server.generate.generation import Generation
from serve_llm.server.http.body_writer import BODY_WRITER, BodyWriter
from serve_llm.server.http.errors import RequestError
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.response.builder import ChatBuilder, CompletionBuilder, ResponseMeta, encode_json
from serve_llm.server.response.sse import SSEEncoder
from serve_llm.server.routes.app_state import AppState, Caller
from serve_llm.server.routes.document import describe_route
from serve_llm.server.routes.plain_route import PlainRoute
from serve_llm.server.schema.chat import ChatCompletion, ChatEvent, ChatRequest
from serve_llm.server.schema.completions import Completion, CompletionRequest

if TYPE_CHECKING:
    from serve_llm.server.tracing.request_trace import RequestTrace  # imports an optional dependency

PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_ENTRIES = 256
"""Tokens with log-probabilities whose JSON is made in the event loop, at up to 26 us each. More would delay streams, so
a thread makes it."""

Headers = list[tuple[bytes, bytes]]

SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx buffers responses otherwise
]


class BodyBuilder(Protocol):
    """Builds the body of a response without streaming."""

    def build_body(self, deltas: list[Delta], counts: TokenCounts) -> bytes: ...


class EventEncoder(Protocol):
    """Encodes the events of a stream. continuous_usage: `encode` needs the counts. start_seconds: the longest time to
    the first event, ping_seconds: the longest pause after it, or half of that; None: no limit."""

    continuous_usage: bool
    start_seconds: float | None
    ping_seconds: float | None

    def encode(self, deltas: list[Delta], counts: TokenCounts | None) -> bytes: ...

    def encode_ping(self, counts: TokenCounts) -> bytes: ...

    def encode_end(self, counts: TokenCounts) -> bytes: ...

    def encode_error(self, error: RequestError) -> bytes: ...


Builder = TypeVar("Builder", bound=BodyBuilder)


@dataclass(frozen=True)
class TextEndpoint(Generic[Builder]):
    """The differences between the routes that generate text. job: one of `server.prompt.jobs.JOBS` that returns
    `ValidGenerateRequest`. create_encoder: None if there are no streams."""

    job: str
    id_prefix: str
    create_builder: Callable[[Tokenizer, ValidGenerateRequest, ResponseMeta], Builder]
    create_encoder: Callable[[Builder], EventEncoder] | None = None


def create_router(state: AppState) -> APIRouter:
    router = APIRouter(route_class=PlainRoute)

    @router.post(PATHS[0], **describe_route(CompletionRequest, Completion, Completion))
    async def create_completion(request: Request) -> Response:
        """Continue one or more prompts."""
        return complete(state, request)

    @router.post(PATHS[1], **describe_route(ChatRequest, ChatCompletion, ChatEvent))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        return chat(state, request)

    return router


def complete(state: AppState, request: Request) -> Response:
    """Build the response of /v1/completions."""
    endpoint = TextEndpoint("completion", "cmpl", CompletionBuilder, SSEEncoder)
    return GenerationResponse(state, request, endpoint)


def chat(state: AppState, request: Request) -> Response:
    """Build the response of /v1/chat/completions."""
    endpoint = TextEndpoint("chat", "chatcmpl", ChatBuilder, SSEEncoder)
    return GenerationResponse(state, request, endpoint)


@dataclass(frozen=True)
class PreparedRequest(Generic[Builder]):
    """A parsed request and its builders. The generation has not been entered."""

    parsed: ValidGenerateRequest
    generation: Generation
    builder: Builder
    headers: Headers


class GenerationResponse(Response, Generic[Builder]):
    """Answers a request, from reading its body to sending the last byte."""

    response_id: str | None = None  # without prefix; None: a new one

    def __init__(self, state: AppState, request: Request, endpoint: TextEndpoint[Builder]) -> None:
        super().__init__()
        self._state = state
        self._request = request
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Parse and validate, admit, generate, respond.

        Raises RequestError before anything is sent; a later error is the stream's last event. A client that disconnects
        aborts its generation at once.
        """
        arrival = self._state.dispatcher.clock.read()
        with self._state.trace(self._request, self._endpoint.job, arrival) as trace:
            caller = self._state.read_caller(self._request, arrival)
            await self._answer(receive, send, caller, trace)

    async def _answer(self, receive: Receive, send: Send, caller: Caller, trace: RequestTrace | None) -> None:
        """Raises RequestError."""
        state = self._state
        parsed = await self.parse(caller.deadline)
        meta = state.build_meta(self._endpoint.id_prefix, parsed.model, parsed.request_id or self.response_id)
        ignored = state.describe_ignored(self._request, parsed.ignored_fields)
        headers = [(name.encode(), value.encode()) for name, value in ignored.items()]
        builder = self._endpoint.create_builder(state.model.tokenizer, parsed, meta)
        parsed.request.adapter = state.model.find_adapter(parsed.model)
        if state.request_log is not None:
            state.request_log.write(self._request, parsed.model, parsed.request, is_stream=parsed.stream)
        generation = state.open(parsed.request, caller)
        if trace is not None:
            trace.follow(generation, meta, is_stream=parsed.stream)
        await self.respond(receive, send, PreparedRequest(parsed, generation, builder, headers))

    async def parse(self, deadline: float | None) -> ValidGenerateRequest:
        """Parse the body. Raises RequestError."""
        return await self._state.run_prompt_job(self._request, self._endpoint.job, ValidGenerateRequest, deadline)

    async def respond(self, receive: Receive, send: Send, prepared: PreparedRequest[Builder]) -> None:
        """Raises RequestError."""
        generation = prepared.generation
        with generation:  # admits and submits it
            watch = asyncio.create_task(close_on_disconnect(receive, generation))
            if prepared.parsed.stream:
                assert self._endpoint.create_encoder is not None, "the job refuses streams"
                events = self._endpoint.create_encoder(prepared.builder)
                writer = self._request.scope.get(BODY_WRITER)
                respond = _send_events(send, generation, events, prepared.headers, writer)
            else:
                respond = _send_body(send, generation, prepared.builder, prepared.headers)
            try:
                # In its own task: a wake-up runs through all nested coroutines, and the framework's dozen around this
                # one would cost a third of a token's time.
                await asyncio.create_task(respond)
            finally:
                watch.cancel()


async def _send_body(send: Send, generation: Generation, builder: BodyBuilder, headers: Headers) -> None:
    deltas = await generation.read_whole()
    if generation.closed:
        return
    counts = generation.counts(with_times=True)
    if _count_logprobs(deltas) > MAX_ENTRIES:
        body = await asyncio.to_thread(builder.build_body, deltas, counts)
    else:
        body = builder.build_body(deltas, counts)
    await send_content(send, body, headers)


async def send_content(send: Send, content: bytes, headers: Headers) -> None:
    """Send a JSON body."""
    kind = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": [*kind, *headers]})
    await send({"type": "http.response.body", "body": content})


class _EventPusher:
    """Writes the usual events of one stream. Has slots, because a token's time depends on the objects that it
    touches."""

    __slots__ = ("_after_text", "_before_text", "_events", "_generation", "_writer")

    def __init__(self, generation: Generation, events: EventEncoder, writer: BodyWriter) -> None:
        self._generation = generation
        self._events = events
        self._writer = writer
        frame = events.text_frame if isinstance(events, SSEEncoder) and len(generation.choices) == 1 else None
        self._before_text, self._after_text = frame or (b"", b"")

    def write_new(self) -> bool | None:
        """See `Generation.push_to`. Returns None if the client does not keep up, or if the events are too large to be
        made here."""
        if not self._writer.is_ready:
            return None
        if self._before_text:  # usually; without a delta, a token touches fewer objects
            text = self._generation.take_plain_text()
            if text is not None:
                if text:
                    self._writer.write_framed(self._before_text, encode_json(text), self._after_text)
                return bool(text)
        if self._generation.count_new_logprobs() > MAX_ENTRIES:
            return None
        counts = self._generation.counts() if self._events.continuous_usage else None
        content = self._events.encode(self._generation.take_changed(), counts)
        self._writer.write(content)
        return bool(content)


async def _send_events(
    send: Send, generation: Generation, events: EventEncoder, headers: Headers, writer: BodyWriter | None
) -> None:
    """Send the events. writer: for the usual events; None: all are sent by `send`."""
    pusher = None if writer is None else _EventPusher(generation, events, writer)
    has_started = False
    seconds = events.start_seconds
    try:
        while (content := await _encode_next(generation, events, seconds)) is not None:
            seconds = events.ping_seconds
            if not has_started:
                await send({"type": "http.response.start", "status": 200, "headers": [*SSE_HEADERS, *headers]})
                has_started = True
            if content:
                await send({"type": "http.response.body", "body": content, "more_body": True})
            if pusher is not None and await generation.push_to(pusher.write_new, seconds):
                seconds = 0.0
        last = b"" if generation.closed else events.encode_end(generation.counts(with_times=True))
    except RequestError as error:
        if not has_started:
            raise
        last = events.encode_error(error)
    if has_started:
        await send({"type": "http.response.body", "body": last})


async def _encode_next(generation: Generation, events: EventEncoder, seconds: float | None) -> bytes | None:
    """Return the next events, which may be empty, or a ping after this time; None after the last ones, or when closed.
    Raises RequestError."""
    if seconds is not None and not await generation.wait(seconds):
        return events.encode_ping(generation.counts())
    deltas = await generation.next()
    if not deltas:
        return None
    counts = generation.counts() if events.continuous_usage else None
    if _count_logprobs(deltas) > MAX_ENTRIES:
        return await asyncio.to_thread(events.encode, deltas, counts)
    return events.encode(deltas, counts)


def _count_logprobs(deltas: list[Delta]) -> int:
    return sum(len(delta.entries) + len(delta.prompt_logprobs or ()) for delta in deltas)


async def close_on_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()
