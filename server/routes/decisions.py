"""POST /v1/decisions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_llm.server.response.decisions import DecisionBuilder
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.document import describe_route
from serve_llm.server.routes.generation import GenerationResponse, TextEndpoint
from serve_llm.server.routes.plain_route import PlainRoute
from serve_llm.server.schema.decisions import DecisionReply, DecisionRequest

PATHS = ("/v1/decisions",)


def create_router(state: AppState) -> APIRouter:
    router = APIRouter(route_class=PlainRoute)
    endpoint = TextEndpoint("decide", "decision", DecisionBuilder)

    @router.post(PATHS[0], **describe_route(DecisionRequest, DecisionReply))
    async def decide(request: Request) -> Response:
        """Answer typed questions about an input with probabilities."""
        return GenerationResponse(state, request, endpoint)

    return router
