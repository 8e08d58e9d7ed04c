"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from serve_llm.server.prompt.job_results import TokenCount
from serve_llm.server.response.messages import MessageBuilder, MessageEncoder
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.document import describe_route
from serve_llm.server.routes.generation import GenerationResponse, TextEndpoint
from serve_llm.server.routes.plain_route import PlainRoute
from serve_llm.server.schema.messages import (
    CountTokensReply,
    CountTokensRequest,
    MessageEvent,
    MessageReply,
    MessagesRequest,
)

PATHS = ("/v1/messages", "/v1/messages/count_tokens")


def create_router(state: AppState) -> APIRouter:
    router = APIRouter(route_class=PlainRoute)
    endpoint = TextEndpoint("messages", "msg", MessageBuilder, MessageEncoder)

    @router.post(PATHS[0], **describe_route(MessagesRequest, MessageReply, MessageEvent, is_anthropic=True))
    async def create_message(request: Request) -> Response:
        """Answer a conversation, as Anthropic's Messages API does."""
        return GenerationResponse(state, request, endpoint)

    @router.post(PATHS[1], **describe_route(CountTokensRequest, CountTokensReply, is_anthropic=True))
    async def count_tokens(request: Request) -> Response:
        """Return the number of prompt tokens of a conversation."""
        counted = await state.run_prompt_job(request, "count_tokens", TokenCount)
        headers = state.describe_ignored(request, counted.ignored_fields)
        return JSONResponse({"input_tokens": counted.count}, headers=headers)

    return router
