"""POST /v1/responses, /v1/responses/input_tokens and /v1/responses/compact, and with a store the routes of stored
responses."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from serve_llm.server.prompt.job_results import TokenCount
from serve_llm.server.response.compaction import CompactionBuilder
from serve_llm.server.response.responses import ResponsesBuilder, ResponsesEncoder
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.background import BackgroundResponses
from serve_llm.server.routes.document import STORE_PROBLEMS, describe_route
from serve_llm.server.routes.generation import GenerationResponse, TextEndpoint
from serve_llm.server.routes.stored_generation import StoredCompactionResponse, StoredGenerationResponse, run_stored_job
from serve_llm.server.routes.stored_responses import add_routes
from serve_llm.server.schema.responses import (
    CompactionReply,
    CompactRequest,
    InputTokensReply,
    InputTokensRequest,
    ResponseEvent,
    ResponseReply,
    ResponsesRequest,
)

PATHS = ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact")


def create_router(state: AppState) -> APIRouter:
    router = APIRouter()
    endpoint = TextEndpoint("responses", "resp", ResponsesBuilder, ResponsesEncoder)
    store = state.response_store
    background = None if store is None else BackgroundResponses(store)

    @router.post(PATHS[0], **describe_route(ResponsesRequest, ResponseReply, ResponseEvent, problems=STORE_PROBLEMS))
    async def create_response(request: Request) -> Response:
        """Answer a conversation, as OpenAI's Responses API does."""
        if store is None or background is None:
            return GenerationResponse(state, request, endpoint)
        return StoredGenerationResponse(state, request, endpoint, store, background)

    @router.post(PATHS[1], **describe_route(InputTokensRequest, InputTokensReply))
    async def count_input_tokens(request: Request) -> Response:
        """Return the number of prompt tokens of the input."""
        if store is None:
            counted = await state.run_prompt_job(request, "input_tokens", TokenCount)
        else:
            counted = await run_stored_job(state, store, request, "stored_input_tokens", TokenCount, "")
        headers = state.describe_ignored(request, counted.ignored_fields)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted.count}, headers=headers)

    @router.post(PATHS[2], **describe_route(CompactRequest, CompactionReply))
    async def compact_conversation(request: Request) -> Response:
        """Return items that replace a conversation: its messages without the assistant's, and a summary by the
        model."""
        endpoint = TextEndpoint("compact", "resp", CompactionBuilder)
        if store is None:
            return GenerationResponse(state, request, endpoint)
        return StoredCompactionResponse(state, request, endpoint, store)

    if store is not None and background is not None:
        add_routes(router, state, store, background)
    return router
