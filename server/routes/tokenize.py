"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from serve_llm.server.prompt.text_jobs import DetokenizeResult, TokenizeResult
from serve_llm.server.routes.app_state import AppState
from serve_llm.server.routes.document import describe_route
from serve_llm.server.schema.tokenize import (
    DetokenizeReply,
    DetokenizeRequest,
    TokenizeReply,
    TokenizeRequest,
    TokenizerInfo,
)


def create_router(state: AppState) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", **describe_route(TokenizeRequest, TokenizeReply))
    async def tokenize(request: Request) -> Response:
        """The ids of a prompt or a conversation."""
        tokens = await state.run_prompt_job(request, "tokenize", TokenizeResult)
        content: dict[str, object] = {
            "count": len(tokens.ids),
            "max_model_len": state.dispatcher.model_info.max_model_len,
            "tokens": tokens.ids,
            "token_strs": tokens.names,
        }
        return _json_response(content, state.describe_ignored(request, tokens.ignored_fields))

    @router.post("/detokenize", **describe_route(DetokenizeRequest, DetokenizeReply))
    async def detokenize(request: Request) -> Response:
        """The text of ids, special tokens included."""
        text = await state.run_prompt_job(request, "detokenize", DetokenizeResult)
        return _json_response({"prompt": text.text}, state.describe_ignored(request, text.ignored_fields))

    @router.get("/tokenizer_info", **describe_route(None, TokenizerInfo))
    async def show_tokenizer_info() -> TokenizerInfo:
        """What a client needs to render and count prompts itself."""
        tokenizer = state.model.tokenizer
        template = state.model.template
        return TokenizerInfo(
            tokenizer_class=state.model.tokenizer_class,
            chat_template=None if template is None else template.source,
            model_max_length=state.dispatcher.model_info.max_model_len,
            added_tokens=tokenizer.added_tokens,
            **tokenizer.named_tokens,
        )

    return router


def _json_response(content: dict[str, object], headers: dict[str, str]) -> Response:
    """Build a JSON response with msgspec: there may be millions of ids, too many for pydantic."""
    return Response(msgspec.json.encode(content), headers=headers, media_type="application/json")
