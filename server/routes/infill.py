"""POST /infill."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_llm.server.response.infill import InfillBuilder, InfillEncoder
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.document import describe_route
from serve_llm.server.routes.generation import GenerationResponse, TextEndpoint
from serve_llm.server.routes.plain_route import PlainRoute
from serve_llm.server.schema.infill import InfillEvent, InfillReply, InfillRequest

PATHS = ("/infill",)


def create_router(state: AppState) -> APIRouter:
    router = APIRouter(route_class=PlainRoute)
    endpoint = TextEndpoint("infill", "infill", InfillBuilder, InfillEncoder)

    @router.post(PATHS[0], **describe_route(InfillRequest, InfillReply, InfillEvent, InfillReply))
    async def infill(request: Request) -> Response:
        """Return the text at the cursor, as llama.cpp's editor plug-ins request it."""
        return GenerationResponse(state, request, endpoint)

    return router
