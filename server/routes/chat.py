"""POST /v1/chat/completions: parse, generate, answer."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_llm.server.errors import ContextTooLong
from serve_llm.server.metrics import Meter
from serve_llm.server.prompt.params import SamplingParams
from serve_llm.server.prompt.validate import TextRequest, check_text, prepare
from serve_llm.server.reply.shape import ChatShape
from serve_llm.server.routes.document import described
from serve_llm.server.routes.exchange import GenerationResponse, off_loop, read_body
from serve_llm.server.routes.service import Service
from serve_llm.server.schema.chat import ChatCompletion, ChatEvent, ChatRequest, num_characters
from serve_llm.server.schema.common import parse_body


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", **described(ChatRequest, ChatCompletion, ChatEvent))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        return await answer(service, request)

    return routes


async def answer(service: Service, request: Request) -> Response:
    """Everything up to the generation, which starts when the response is sent. Raises RequestError."""
    arrival = Meter.clock()
    service.gate.check()
    body = parse_body(ChatRequest, await read_body(request))
    head = service.head("chatcmpl", body.model)
    body.check()
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling_params(service.model.defaults, max_tokens=max_tokens, logprobs=body.num_logprobs)
    size = body.text_size + num_characters(body.messages)
    text_request = await off_loop(size, lambda: _prepare(service, body, params))
    shape = ChatShape(service.model.tokenizer, text_request, bool(body.return_token_ids))
    return GenerationResponse(service.gate, service.generator.open(text_request, arrival), shape, head, body)


def _prepare(service: Service, body: ChatRequest, params: SamplingParams) -> TextRequest:
    model, facts = service.model, service.replicas.facts
    text = body.render(model.template, body.messages)
    check_text(text, model, facts, params.truncate_prompt_tokens is not None, "messages")
    # The template writes the special tokens itself.
    ids = model.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    try:
        return prepare(
            [ids],
            params,
            model,
            facts,
            param="messages",
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
    except ContextTooLong as error:
        if error.param != "max_tokens" or body.max_completion_tokens is None:
            raise
        raise ContextTooLong(
            error.message.replace("max_tokens", "max_completion_tokens"), "max_completion_tokens"
        ) from None
