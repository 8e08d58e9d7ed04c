"""POST /v1/embeddings, /v2/embed, /v1/rerank, /v1/score, /classify and /pooling."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_llm.server.prompt.pooling_jobs import ValidPoolingRequest
from serve_llm.server.response.vectors import (
    BuildBody,
    build_classes,
    build_cohere_embeddings,
    build_embeddings,
    build_pooled,
    build_ranking,
    build_scores,
)
from serve_llm.server.routes.app_state import AppState, Caller
from serve_llm.server.routes.document import describe_route
from serve_llm.server.routes.generation import Headers, close_on_disconnect, send_content
from serve_llm.server.routes.plain_route import PlainRoute
from serve_llm.server.schema.cohere import CohereEmbedReply, CohereEmbedRequest
from serve_llm.server.schema.pooling import (
    ClassificationReply,
    ClassificationRequest,
    EmbeddingReply,
    EmbeddingRequest,
    PooledVectorReply,
    PoolingRequest,
    RerankReply,
    RerankRequest,
    ScoreReply,
    ScoreRequest,
)

if TYPE_CHECKING:
    from serve_llm.server.tracing.request_trace import RequestTrace  # imports an optional dependency

PAUSE_BYTES = 65536  # written in less than a millisecond


def create_router(state: AppState) -> APIRouter:
    router = APIRouter(route_class=PlainRoute)

    @router.post("/v1/embeddings", **describe_route(EmbeddingRequest, EmbeddingReply))
    async def create_embeddings(request: Request) -> Response:
        """The embedding of each text."""
        return embed(state, request)

    @router.post("/v2/embed", **describe_route(CohereEmbedRequest, CohereEmbedReply))
    async def create_cohere_embeddings(request: Request) -> Response:
        """The embedding of each text, in Cohere's API."""
        return PoolingResponse(state, request, "embed_cohere", "embd", build_cohere_embeddings)

    @router.post("/v1/rerank", **describe_route(RerankRequest, RerankReply))
    @router.post("/rerank", **describe_route(RerankRequest, RerankReply))
    @router.post("/v2/rerank", **describe_route(RerankRequest, RerankReply))
    async def create_ranking(request: Request) -> Response:
        """Documents ordered by their relevance to a query."""
        return rerank(state, request)

    @router.post("/v1/score", **describe_route(ScoreRequest, ScoreReply))
    @router.post("/score", **describe_route(ScoreRequest, ScoreReply))
    async def create_scores(request: Request) -> Response:
        """How well texts match."""
        return score(state, request)

    @router.post("/classify", **describe_route(ClassificationRequest, ClassificationReply))
    async def create_classes(request: Request) -> Response:
        """The class of each text."""
        return classify(state, request)

    @router.post("/pooling", **describe_route(PoolingRequest, PooledVectorReply))
    async def create_vectors(request: Request) -> Response:
        """The vector of each text as the model computes it."""
        return pool(state, request)

    return router


def embed(state: AppState, request: Request) -> Response:
    """Build the response of /v1/embeddings."""
    return PoolingResponse(state, request, "embed", "embd", build_embeddings)


def rerank(state: AppState, request: Request) -> Response:
    """Build the response of /v1/rerank."""
    return PoolingResponse(state, request, "rerank", "rerank", build_ranking)


def classify(state: AppState, request: Request) -> Response:
    """Build the response of /classify."""
    return PoolingResponse(state, request, "classify", "classify", build_classes)


def score(state: AppState, request: Request) -> Response:
    """Build the response of /v1/score."""
    return PoolingResponse(state, request, "score", "score", build_scores)


def pool(state: AppState, request: Request) -> Response:
    """Build the response of /pooling."""
    return PoolingResponse(state, request, "pool", "pool", build_pooled)


class PoolingResponse(Response):
    """Answers a request whose result is vectors."""

    def __init__(self, state: AppState, request: Request, job: str, id_prefix: str, build_body: BuildBody) -> None:
        """job: one of `server.prompt.jobs.JOBS` that returns `ValidPoolingRequest`."""
        super().__init__()
        self._state = state
        self._request = request
        self._job = job
        self._id_prefix = id_prefix
        self._build_body = build_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Parse and validate, admit, compute, respond. Raises RequestError. A client that disconnects ends it."""
        arrival = self._state.dispatcher.clock.read()
        with self._state.trace(self._request, self._job, arrival) as trace:
            caller = self._state.read_caller(self._request, arrival)
            await self._answer(receive, send, caller, trace)

    async def _answer(self, receive: Receive, send: Send, caller: Caller, trace: RequestTrace | None) -> None:
        """Raises RequestError."""
        state = self._state
        parsed = await state.run_prompt_job(self._request, self._job, ValidPoolingRequest, caller.deadline)
        meta = state.build_meta(self._id_prefix, parsed.model, parsed.request_id)
        parsed.request.adapter = state.model.find_adapter(parsed.model)
        if state.request_log is not None:
            state.request_log.write(self._request, parsed.model, parsed.request)
        generation = state.open(parsed.request, caller)
        ignored = state.describe_ignored(self._request, parsed.ignored_fields)
        headers: Headers = [(name.encode(), value.encode()) for name, value in ignored.items()]
        if trace is not None:
            trace.follow(generation, meta)
        with generation:  # admits and submits it
            watch = asyncio.create_task(close_on_disconnect(receive, generation))
            try:
                deltas = await generation.read_whole()
            finally:
                watch.cancel()
        if not deltas:
            return
        vectors = [delta.vector or b"" for delta in deltas]
        content = await join_parts(self._build_body(parsed, vectors, meta, state.model.vectors))
        await send_content(send, content, headers)


async def join_parts(parts: Iterable[bytes]) -> bytes:
    """Join the parts, letting other requests run meanwhile."""
    content = bytearray()
    num_bytes_at_pause = 0
    for part in parts:
        content += part
        if len(content) - num_bytes_at_pause >= PAUSE_BYTES:
            num_bytes_at_pause = len(content)
            await asyncio.sleep(0)
    return bytes(content)
