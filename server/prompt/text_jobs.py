"""Jobs without generation: text to ids and back, and finding the kind of a request. See `prompt.jobs`."""

from __future__ import annotations

import msgspec

from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt.chat_turn import render_turn
from serve_llm.server.prompt.context import JobContext, parse_openai_body
from serve_llm.server.schema.json_text import read_fields
from serve_llm.server.schema.tokenize import DetokenizeRequest, TokenizeRequest


class TokenizeResult(msgspec.Struct):
    ids: list[int]
    names: list[str] | None = None  # one per id, as in the vocabulary
    ignored_fields: list[str] = []


class DetokenizeResult(msgspec.Struct):
    text: str
    ignored_fields: list[str] = []


class RouteName(msgspec.Struct):
    name: str


def tokenize(content: bytes, context: JobContext) -> TokenizeResult:
    body, ignored = parse_openai_body(TokenizeRequest, content, context)
    context.model.check_name(body.model)
    body.check()
    tokenizer = context.model.tokenizer
    if body.messages is not None:
        turn = body.to_turn(context.limits)
        ignored += turn.skipped
        text = render_turn(turn, context)
        add_special_tokens = bool(body.add_special_tokens)
    else:
        text = body.prompt or ""
        add_special_tokens = body.add_special_tokens is not False
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    names = [tokenizer.token_name(token_id) for token_id in ids] if body.return_token_strs else None
    return TokenizeResult(ids, names, ignored)


def detokenize(content: bytes, context: JobContext) -> DetokenizeResult:
    body, ignored = parse_openai_body(DetokenizeRequest, content, context)
    context.model.check_name(body.model)
    vocab_size = context.model_info.vocab_size
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocab_size:
        raise InvalidRequest(f"tokens must be ids from 0 to {vocab_size - 1}", "tokens")
    return DetokenizeResult(context.model.tokenizer.decode(body.tokens, skip_special_tokens=False), ignored)


def find_route(content: bytes, context: JobContext) -> RouteName:
    """Find the kind of a request to /invocations by its fields."""
    fields = {name for name, value in read_fields(content, context.limits).items() if value is not None}
    if "messages" in fields and context.model_info.generates:
        return RouteName("chat")
    if "prompt" in fields:
        return RouteName("completion")
    if "query" in fields and "documents" in fields:
        return RouteName("rerank")
    if fields & {"queries", "text_1", "data_1"}:
        return RouteName("score")
    if "input" in fields and "task" in fields:
        return RouteName("pool")
    if "input" in fields or "messages" in fields:
        return RouteName(
            {"classify": "classify", "token_classify": "pool"}.get(context.model_info.pooling_task, "embed")
        )
    raise InvalidRequest(
        "one of messages, prompt, input, queries, text_1, data_1, or query and documents is required", "messages"
    )
