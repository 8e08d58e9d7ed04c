"""POST /v1/completions: parse, generate, answer."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_llm.server.errors import InvalidRequest
from serve_llm.server.metrics import Meter
from serve_llm.server.prompt.params import SamplingParams
from serve_llm.server.prompt.validate import TextRequest, check_text, prepare
from serve_llm.server.reply.shape import CompletionShape
from serve_llm.server.routes.document import described
from serve_llm.server.routes.exchange import GenerationResponse, off_loop, read_body
from serve_llm.server.routes.service import Service
from serve_llm.server.schema.common import parse_body
from serve_llm.server.schema.completions import Completion, CompletionRequest

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_MAX_CHOICES = 2048  # prompts times n


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", **described(CompletionRequest, Completion, Completion))
    async def create_completion(request: Request) -> Response:
        """Continue one or more prompts."""
        return await answer(service, request)

    return routes


async def answer(service: Service, request: Request) -> Response:
    """Everything up to the generation, which starts when the response is sent. Raises RequestError."""
    arrival = Meter.clock()
    service.gate.check()
    body = parse_body(CompletionRequest, await read_body(request))
    head = service.head("cmpl", body.model)
    body.check()
    params = body.sampling_params(service.model.defaults, max_tokens=body.max_tokens)
    prompts = body.prompts()
    if len(prompts) * params.n > _MAX_CHOICES:
        raise InvalidRequest(
            f"{len(prompts)} prompts times n = {params.n} is more than {_MAX_CHOICES} choices", "prompt"
        )
    size = body.text_size + sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    text_request = await off_loop(size, lambda: _prepare(service, body, prompts, params))
    shape = CompletionShape(service.model.tokenizer, text_request, bool(body.return_token_ids))
    return GenerationResponse(service.gate, service.generator.open(text_request, arrival), shape, head, body)


def _prepare(
    service: Service, body: CompletionRequest, prompts: list[str | list[int]], params: SamplingParams
) -> TextRequest:
    model, facts = service.model, service.replicas.facts
    all_ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text(prompt, model, facts, params.truncate_prompt_tokens is not None, "prompt")
            prompt = model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
        all_ids.append(prompt)
    return prepare(
        all_ids,
        params,
        model,
        facts,
        echo=[prompt if isinstance(prompt, str) else None for prompt in prompts] if body.echo else None,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
