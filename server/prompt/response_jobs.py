"""Jobs of the Responses API. See `prompt.jobs`."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic_core import from_json

from serve_llm.server.prompt.chat_turn import count_prompt_tokens, prepare_turn
from serve_llm.server.prompt.context import JobContext
from serve_llm.server.prompt.items import describe_items, drop_compacted, keep_messages, read_kind
from serve_llm.server.prompt.job_results import TokenCount, ValidGenerateRequest
from serve_llm.server.sampling_params import SamplingParams
from serve_llm.server.schema.common import parse_lenient_body
from serve_llm.server.schema.responses import INCLUDED_REASONING, CompactRequest, InputTokensRequest, ResponsesRequest
from serve_llm.server.schema.unknown_fields import join_ignored


class References(msgspec.Struct):
    """The stored objects that a body of the Responses API refers to."""

    previous_id: str | None = None
    item_ids: list[str] = []


class StoredContext(msgspec.Struct):
    """A body of the Responses API with the stored objects that it refers to. Items are JSON."""

    body: bytes
    response_id: str  # without prefix
    history: list[bytes] | None  # items of the conversation so far; None: the body names no previous response
    items: dict[str, bytes]  # items that the body refers to, by id


_decode_context = msgspec.msgpack.Decoder(StoredContext).decode


def responses(content: bytes, context: JobContext, stored: StoredContext | None = None) -> ValidGenerateRequest:
    """stored: None without a store."""
    body, ignored = parse_lenient_body(ResponsesRequest, content, context.limits)
    model = context.model.check_name(body.model)
    body.check(stored is not None, context.limits)
    history = None if stored is None else _resolve(body, stored)
    params = body.build_params(context.model.defaults)
    turn, skipped = body.to_turn(params, context.limits, history)
    is_stored = stored is not None and body.store is not False
    _, request = prepare_turn(turn, context)
    if body.request_id is not None and is_stored:
        skipped.append("request_id")  # stored responses have unique ids
    return ValidGenerateRequest(
        request=request,
        model=model,
        request_id="" if is_stored else (body.request_id or "").removeprefix("resp_"),
        stream=bool(body.stream),
        include_usage=True,
        ignored_fields=join_ignored(ignored, skipped + body.find_ignored_includes()),
        echo=body.describe(params, is_stored),
        tool_items=body.tool_items,
        encrypts_reasoning=INCLUDED_REASONING in (body.include or ()),
        background=bool(body.background),
        is_compaction=body.is_compaction,
        stored_items=describe_items(body.input or (), stored.response_id) if stored is not None and is_stored else None,
        previous_id=body.previous_response_id,
    )


def input_tokens(content: bytes, context: JobContext, stored: StoredContext | None = None) -> TokenCount:
    """stored: None without a store."""
    body, ignored = parse_lenient_body(InputTokensRequest, content, context.limits)
    context.model.check_name(body.model)
    history = None if stored is None else _resolve(body, stored)
    turn, skipped = body.to_turn(SamplingParams(), context.limits, history)
    return TokenCount(count_prompt_tokens(turn, context), join_ignored(ignored, skipped))


def compact(content: bytes, context: JobContext, stored: StoredContext | None = None) -> ValidGenerateRequest:
    """stored: None without a store."""
    body, ignored = parse_lenient_body(CompactRequest, content, context.limits)
    model = context.model.check_name(body.model)
    history = None if stored is None else _resolve(body, stored)
    turn, skipped = body.to_turn(body.build_params(context.model.defaults), context.limits, history)
    _, request = prepare_turn(turn, context)
    return ValidGenerateRequest(
        request=request,
        model=model,
        ignored_fields=join_ignored(ignored, skipped),
        kept_messages=keep_messages(history or (), body.input or ()),
    )


def stored_responses(content: bytes, context: JobContext) -> ValidGenerateRequest:
    """content: a StoredContext in msgpack."""
    stored = _decode_context(content)
    return responses(stored.body, context, stored)


def stored_input_tokens(content: bytes, context: JobContext) -> TokenCount:
    """content: as for `stored_responses`."""
    stored = _decode_context(content)
    return input_tokens(stored.body, context, stored)


def stored_compact(content: bytes, context: JobContext) -> ValidGenerateRequest:
    """content: as for `stored_responses`."""
    stored = _decode_context(content)
    return compact(stored.body, context, stored)


class _ItemHead(msgspec.Struct):
    type: Any = None
    id: Any = None


class _ReferenceFields(msgspec.Struct):
    previous_response_id: str | None = None
    input: str | list[_ItemHead] | None = None


def response_references(content: bytes, context: JobContext) -> References:
    """Returns nothing for an invalid body; the job that follows reports the error."""
    try:
        fields = msgspec.json.decode(content, type=_ReferenceFields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return References()
    heads = fields.input if isinstance(fields.input, list) else []
    # A reference may lack its type. Other items without a type stay unchanged.
    item_ids = [head.id for head in heads if head.type in (None, "item_reference") and isinstance(head.id, str)]
    return References(fields.previous_response_id, item_ids[: context.limits.messages])


def _resolve(body: InputTokensRequest, stored: StoredContext) -> list[dict[str, object]] | None:
    """Replace references in the body's input by the stored items. Returns the conversation so far."""
    if isinstance(body.input, list):
        body.input = [_find_item(item, stored.items) for item in body.input]
    if stored.history is None:
        return None
    return drop_compacted([from_json(item) for item in stored.history])


def _find_item(item: dict[str, object], stored: dict[str, bytes]) -> dict[str, object]:
    if read_kind(item) != "item_reference":
        return item
    content = stored.get(str(item.get("id")))
    return item if content is None else from_json(content)
