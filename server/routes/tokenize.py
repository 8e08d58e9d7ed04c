"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request

from serve_llm.server.errors import InvalidRequest
from serve_llm.server.routes.document import described
from serve_llm.server.routes.exchange import off_loop, read_body
from serve_llm.server.routes.service import Service
from serve_llm.server.schema.chat import num_characters
from serve_llm.server.schema.common import parse_body
from serve_llm.server.schema.tokenize import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest


def router(service: Service) -> APIRouter:
    routes = APIRouter()
    tokenizer = service.model.tokenizer

    @routes.post("/tokenize", response_model_exclude_unset=True, **described(TokenizeRequest, TokenizeReply))
    async def tokenize(request: Request) -> TokenizeReply:
        """The ids that a prompt, or a conversation, becomes."""
        service.gate.check()
        body = parse_body(TokenizeRequest, await read_body(request))
        service.check_model(body.model)
        body.check()
        size = num_characters(body.messages or []) + len(body.prompt or "")
        ids = await off_loop(size, lambda: _encode(service, body))
        reply = TokenizeReply(count=len(ids), max_model_len=service.replicas.facts.max_model_len, tokens=ids)
        if body.return_token_strs:
            reply.token_strs = [tokenizer.token_text(token_id) for token_id in ids]
        return reply

    @routes.post("/detokenize", **described(DetokenizeRequest, DetokenizeReply))
    async def detokenize(request: Request) -> DetokenizeReply:
        """The text of ids, special tokens included."""
        service.gate.check()
        body = parse_body(DetokenizeRequest, await read_body(request))
        service.check_model(body.model)
        vocab_size = service.replicas.facts.vocab_size
        if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocab_size:
            raise InvalidRequest(f"tokens must be ids from 0 to {vocab_size - 1}", "tokens")
        text = await off_loop(len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
        return DetokenizeReply(prompt=text)

    return routes


def _encode(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        text = body.render(service.model.template, body.messages)
        return service.model.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    return service.model.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
