"""POST /v1/completions: parse, generate, answer."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_llm.server.prompt.jobs import Generate
from serve_llm.server.reply.shape import CompletionShape
from serve_llm.server.routes.document import described
from serve_llm.server.routes.exchange import GenerationResponse, run_job
from serve_llm.server.routes.service import Service
from serve_llm.server.schema.completions import Completion, CompletionRequest


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", **described(CompletionRequest, Completion, Completion))
    async def create_completion(request: Request) -> Response:
        """Continue one or more prompts."""
        return await answer(service, request)

    return routes


async def answer(service: Service, request: Request) -> Response:
    """Everything up to the generation, which starts when the response is sent. Raises RequestError."""
    caller = service.caller(request)
    made = await run_job(service, request, "completion", Generate, caller.deadline)
    shape = CompletionShape(service.model.tokenizer, made.request, made.return_token_ids)
    return GenerationResponse(service, caller, made, shape, service.head("cmpl", made.model))
