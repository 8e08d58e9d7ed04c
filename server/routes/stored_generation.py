"""POST /v1/responses with a store: what the request refers to is read from the store, and its response is stored before
the client has received all of it."""

from __future__ import annotations

import logging
import uuid
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Send

from serve_llm.server.http.errors import StoreError
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.response_jobs import References, StoredContext
from serve_llm.server.response.builder import Json, encode_json
from serve_llm.server.response.compaction import CompactionBuilder
from serve_llm.server.response.responses import ResponsesBuilder, ResponsesEncoder
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.background import BackgroundResponses, build_outcome, replace_end
from serve_llm.server.routes.generation import (
    SSE_HEADERS,
    GenerationResponse,
    PreparedRequest,
    TextEndpoint,
    send_content,
)
from serve_llm.server.storage.responses import NewResponse, ResponseStore

logger = logging.getLogger(__name__)

Result = TypeVar("Result", bound=msgspec.Struct)


async def run_stored_job(
    state: AppState,
    store: ResponseStore,
    request: Request,
    kind: str,
    result: type[Result],
    response_id: str,
    deadline: float | None = None,
) -> Result:
    """Read the body, what it refers to, and run a job that takes a `StoredContext`. Raises RequestError."""
    owner = state.read_owner(request)
    async with state.reading_body(request) as body:
        found = await state.prompts.run("response_references", body, References, deadline)
        history = None
        if found.previous_id is not None:
            history = await store.load_history(found.previous_id, owner, state.limits)
        items = await store.find_items(found.item_ids, owner)
        content = msgspec.msgpack.encode(StoredContext(body, response_id, history, items))
        return await state.prompts.run(kind, content, result, deadline)


class StoredGenerationResponse(GenerationResponse[ResponsesBuilder]):
    """Answers and stores a response. One whose client disconnects is stored as cancelled, unless it is a background
    response."""

    def __init__(
        self,
        state: AppState,
        request: Request,
        endpoint: TextEndpoint[ResponsesBuilder],
        store: ResponseStore,
        background: BackgroundResponses,
    ) -> None:
        super().__init__(state, request, endpoint)
        self.response_id: str = uuid.uuid4().hex
        self._store = store
        self._background = background

    async def parse(self, deadline: float | None) -> ValidGenerateRequest:
        job = f"stored_{self._endpoint.job}"
        return await run_stored_job(
            self._state, self._store, self._request, job, ValidGenerateRequest, self.response_id, deadline
        )

    async def respond(self, receive: Receive, send: Send, prepared: PreparedRequest[ResponsesBuilder]) -> None:
        parsed = prepared.parsed
        if parsed.stored_items is None:
            await super().respond(receive, send, prepared)
            return
        owner = self._state.read_owner(self._request)
        new = NewResponse(prepared.builder.id, owner, parsed.previous_id, parsed.background, parsed.stored_items)
        if parsed.background:
            await self._respond_in_background(receive, send, prepared, new)
        else:
            await self._respond_and_store(receive, send, prepared, new)

    async def _respond_and_store(
        self, receive: Receive, send: Send, prepared: PreparedRequest[ResponsesBuilder], new: NewResponse
    ) -> None:
        has_ended = False

        async def send_after_storing(message: Message) -> None:
            nonlocal has_ended
            if message["type"] == "http.response.start" and not prepared.parsed.stream:
                return  # the length of the body depends on what follows
            if message["type"] != "http.response.body" or message.get("more_body"):
                await send(message)
                return
            has_ended = True
            is_stored = await self._save(prepared, new)
            if prepared.parsed.stream:
                content = message["body"] if is_stored else replace_end(message["body"], describe_unstored(prepared))
                await send({**message, "body": content})
            else:
                content = message["body"] if is_stored else encode_json(describe_unstored(prepared))
                await send_content(send, content, prepared.headers)

        await super().respond(receive, send_after_storing, prepared)
        if not has_ended:  # a client that has disconnected gets no message
            await self._save(prepared, new)

    async def _save(self, prepared: PreparedRequest[ResponsesBuilder], new: NewResponse) -> bool:
        """Returns whether the response is stored."""
        builder = prepared.builder
        generation = prepared.generation
        if builder.final is None:
            ResponsesEncoder(builder).encode_cancelled(generation.take_rest(), generation.counts())
        assert builder.final is not None
        try:
            return await self._store.add(new, build_outcome(builder.final))
        except StoreError:
            logger.warning("response %s cannot be stored", new.id)
            return False

    async def _respond_in_background(
        self, receive: Receive, send: Send, prepared: PreparedRequest[ResponsesBuilder], new: NewResponse
    ) -> None:
        is_stream = prepared.parsed.stream
        queued = encode_json(prepared.builder.describe("queued"))
        response = await self._background.start(new, prepared.builder, prepared.generation, keeps_events=is_stream)
        if not is_stream:
            await send_content(send, queued, prepared.headers)
            return
        streaming = StreamingResponse(response.follow(0))
        streaming.raw_headers = [*SSE_HEADERS, *prepared.headers]
        await streaming(self._request.scope, receive, send)


class StoredCompactionResponse(GenerationResponse[CompactionBuilder]):
    """Answers a request for the summary of a conversation that may be stored here. The summary itself is not stored."""

    def __init__(
        self, state: AppState, request: Request, endpoint: TextEndpoint[CompactionBuilder], store: ResponseStore
    ) -> None:
        super().__init__(state, request, endpoint)
        self._store = store

    async def parse(self, deadline: float | None) -> ValidGenerateRequest:
        job = f"stored_{self._endpoint.job}"
        return await run_stored_job(self._state, self._store, self._request, job, ValidGenerateRequest, "", deadline)


def describe_unstored(prepared: PreparedRequest[ResponsesBuilder]) -> Json:
    """Describe the end of the response if it could not be stored."""
    assert prepared.builder.final is not None
    return {**prepared.builder.final, "store": False}
