"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request

from serve_llm.server.prompt.jobs import Text, Tokens
from serve_llm.server.routes.document import described
from serve_llm.server.routes.exchange import run_job
from serve_llm.server.routes.service import Service
from serve_llm.server.schema.tokenize import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", response_model_exclude_unset=True, **described(TokenizeRequest, TokenizeReply))
    async def tokenize(request: Request) -> TokenizeReply:
        """The ids that a prompt, or a conversation, becomes."""
        made = await run_job(service, request, "tokenize", Tokens)
        facts = service.replicas.facts
        reply = TokenizeReply(count=len(made.ids), max_model_len=facts.max_model_len, tokens=made.ids)
        if made.texts is not None:
            reply.token_strs = made.texts
        return reply

    @routes.post("/detokenize", **described(DetokenizeRequest, DetokenizeReply))
    async def detokenize(request: Request) -> DetokenizeReply:
        """The text of ids, special tokens included."""
        made = await run_job(service, request, "detokenize", Text)
        return DetokenizeReply(prompt=made.text)

    return routes
