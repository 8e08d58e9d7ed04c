"""POST /tokenize and /detokenize."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_llm.server.prompt.jobs import Text, Tokens
from serve_llm.server.routes.document import described
from serve_llm.server.routes.exchange import run_job
from serve_llm.server.routes.service import Service
from serve_llm.server.schema.tokenize import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", **described(TokenizeRequest, TokenizeReply))
    async def tokenize(request: Request) -> Response:
        """The ids that a prompt, or a conversation, becomes."""
        made = await run_job(service, request, "tokenize", Tokens)
        reply = {"count": len(made.ids), "max_model_len": service.replicas.facts.max_model_len, "tokens": made.ids}
        if made.texts is not None:
            reply["token_strs"] = made.texts
        return _json(reply)  # there may be millions, too many for pydantic

    @routes.post("/detokenize", **described(DetokenizeRequest, DetokenizeReply))
    async def detokenize(request: Request) -> Response:
        """The text of ids, special tokens included."""
        made = await run_job(service, request, "detokenize", Text)
        return _json({"prompt": made.text})

    return routes


def _json(reply: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")
