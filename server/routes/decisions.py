"""POST /v1/decisions."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_llm.server.prompt.decisions import Question
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.response.builder import ResponseMeta
from serve_llm.server.response.decisions import DecisionBuilder
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.document import describe_route
from serve_llm.server.routes.generation import EventEncoder, GenerationResponse, TextEndpoint
from serve_llm.server.schema.decisions import DecisionReply, DecisionRequest

PATHS = ("/v1/decisions",)


def create_router(state: AppState) -> APIRouter:
    router = APIRouter()
    endpoint = TextEndpoint("decide", "decision", _create_builder, _create_encoder)

    @router.post(PATHS[0], **describe_route(DecisionRequest, DecisionReply))
    async def decide(request: Request) -> Response:
        """Answer typed questions about an input with probabilities."""
        return GenerationResponse(state, request, endpoint)

    return router


def _create_builder(tokenizer: Tokenizer, parsed: ValidGenerateRequest, meta: ResponseMeta) -> DecisionBuilder:
    return DecisionBuilder(meta, msgspec.convert(parsed.echo["questions"], list[Question]))


def _create_encoder(builder: DecisionBuilder, parsed: ValidGenerateRequest) -> EventEncoder:
    raise AssertionError("decisions are not streamed")
