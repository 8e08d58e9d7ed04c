"""Turn request bodies into validated requests: one function per kind of request, run by `prompt.pool`.

All work whose cost depends on client input happens here: parsing, templates, tokenizing, checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from pydantic_core import from_json

from serve_llm.server.http.anthropic_errors import reword_long_prompt
from serve_llm.server.http.errors import ContextTooLong, InvalidRequest, Unsupported
from serve_llm.server.prompt.chat_turn import ChatTurn, drop_budget, prepare_turn, render_turn
from serve_llm.server.prompt.context import Context, parse_openai_body
from serve_llm.server.prompt.decisions import prepare_questions
from serve_llm.server.prompt.fill_in_middle import FillInMiddle
from serve_llm.server.prompt.items import StoredItem, ToolItem, describe_items, read_kind, translate_items
from serve_llm.server.prompt.messages import read_text
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pooling_jobs import classify, embed, pool, rerank, score
from serve_llm.server.prompt.text_jobs import Text, detokenize, find_route, tokenize
from serve_llm.server.prompt.validate import Echo, TextRequest, check_text, check_volume, prepare
from serve_llm.server.sampling_params import SamplingParams
from serve_llm.server.schema.chat import ChatRequest
from serve_llm.server.schema.common import SamplingBody, parse_lenient_body
from serve_llm.server.schema.completions import CompletionRequest
from serve_llm.server.schema.decisions import DecisionRequest
from serve_llm.server.schema.infill import InfillRequest
from serve_llm.server.schema.messages import CountTokensRequest, MessagesRequest
from serve_llm.server.schema.responses import INCLUDED_REASONING, InputTokensRequest, ResponsesRequest
from serve_llm.server.schema.tools import list_custom_tools
from serve_llm.server.schema.unknown_fields import join_ignored
from serve_llm.server.structured_output.compiler import Grammar
from serve_llm.server.structured_output.turn_form import decode_source

_DEFAULT_MAX_TOKENS = 16  # OpenAI's, for completions


class Generate(msgspec.Struct, kw_only=True):
    """A valid completion or chat completion request."""

    request: TextRequest
    model: str  # name for the reply
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_metrics: bool = False
    request_id: str = ""  # for the response's id
    opening_text: str = ""  # put before the content of every choice
    ignored_fields: list[str] = []  # parts of the body without effect
    echo: dict[str, object] = {}  # fields of a response that repeat the request
    tool_items: dict[str, ToolItem] = {}  # by the name that the model calls; in chat, custom tools only
    encrypts_reasoning: bool = False  # reasoning items hold an opaque copy of their text
    omits_thinking: bool = False  # thinking blocks hold their text in their signature alone
    background: bool = False  # the client does not wait for the response
    stored_items: list[StoredItem] | None = None  # the input, where the response is to be stored
    previous_id: str | None = None  # the stored response that this one continues


class TokenCount(msgspec.Struct):
    count: int
    ignored_fields: list[str] = []


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


def chat(content: bytes, context: Context) -> Generate:
    body, ignored = parse_openai_body(ChatRequest, content, context)
    context.model.check_name(body.model)
    body.check(context.limits)
    params = body.chat_params(context.model.defaults)
    ignored += body.ineffective_fields
    ignored += drop_budget(params, body.budget_hint, context.model)
    turn = body.to_turn(params, context.limits)
    _, request = prepare_turn(turn, context)
    opening_text = read_text(turn.messages[-1]) if body.echo and turn.messages[-1]["role"] == "assistant" else ""
    generate = _generate(request, body, context.model, ignored, opening_text)
    generate.tool_items = list_custom_tools(body.tools or [])
    return generate


def messages(content: bytes, context: Context) -> Generate:
    body, ignored = parse_lenient_body(MessagesRequest, content, context.limits)
    model = context.model.check_name(body.model)
    body.check(context.limits)
    params = body.build_params(context.model.defaults)
    hint = None if params.thinking_token_budget is None else "thinking.budget_tokens"
    dropped = drop_budget(params, hint, context.model)
    ignored += dropped if body.thinking is not None and body.thinking.type == "enabled" else []
    turn, skipped = body.to_turn(params, context.limits)
    try:
        _, request = prepare_turn(replace(turn, default_max_tokens=body.max_tokens), context)
    except ContextTooLong as error:
        raise reword_long_prompt(error) from None
    return Generate(
        request=request,
        model=model,
        stream=bool(body.stream),
        include_usage=True,
        continuous_usage=True,
        omits_thinking=body.omits_thinking,
        ignored_fields=join_ignored(ignored, skipped),
    )


def count_tokens(content: bytes, context: Context) -> TokenCount:
    return _count_prompt(CountTokensRequest, content, context)


def responses(content: bytes, context: Context) -> Generate:
    return _prepare_response(content, context, None)


def stored_responses(content: bytes, context: Context) -> Generate:
    """content: a StoredContext in msgpack."""
    stored = msgspec.msgpack.decode(content, type=StoredContext)
    return _prepare_response(stored.body, context, stored)


def _prepare_response(content: bytes, context: Context, stored: StoredContext | None) -> Generate:
    """stored: None without a store."""
    body, ignored = parse_lenient_body(ResponsesRequest, content, context.limits)
    model = context.model.check_name(body.model)
    body.check(stored is not None)
    history = None if stored is None else _resolve(body, stored)
    params = body.build_params(context.model.defaults)
    turn, skipped = body.to_turn(params, context.limits, history)
    is_stored = stored is not None and body.store is not False
    _, request = prepare_turn(turn, context)
    return Generate(
        request=request,
        model=model,
        stream=bool(body.stream),
        include_usage=True,
        ignored_fields=join_ignored(ignored, skipped + body.find_ignored_includes()),
        echo=body.describe(params, is_stored),
        tool_items=body.tool_items,
        encrypts_reasoning=INCLUDED_REASONING in (body.include or ()),
        background=bool(body.background),
        stored_items=describe_items(body.input, stored.response_id) if stored is not None and is_stored else None,
        previous_id=body.previous_response_id,
    )


def input_tokens(content: bytes, context: Context) -> TokenCount:
    return _count_prompt(InputTokensRequest, content, context)


def stored_input_tokens(content: bytes, context: Context) -> TokenCount:
    """content: a StoredContext in msgpack."""
    stored = msgspec.msgpack.decode(content, type=StoredContext)
    body, ignored = parse_lenient_body(InputTokensRequest, stored.body, context.limits)
    context.model.check_name(body.model)
    turn, skipped = body.to_turn(SamplingParams(), context.limits, _resolve(body, stored))
    return _count_turn(turn, context, join_ignored(ignored, skipped))


class _ItemHead(msgspec.Struct):
    type: Any = None
    id: Any = None


class _ReferenceFields(msgspec.Struct):
    previous_response_id: str | None = None
    input: str | list[_ItemHead] = ""


def response_references(content: bytes, context: Context) -> References:
    """Returns nothing for an invalid body; the job that follows reports the error."""
    try:
        fields = msgspec.json.decode(content, type=_ReferenceFields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return References()
    heads = [] if isinstance(fields.input, str) else fields.input
    # A reference may lack its type. Other items without a type stay unchanged.
    item_ids = [head.id for head in heads if head.type in (None, "item_reference") and isinstance(head.id, str)]
    return References(fields.previous_response_id, item_ids[: context.limits.messages])


def _resolve(body: InputTokensRequest, stored: StoredContext) -> list[dict[str, object]] | None:
    """Replace references in the body's input by the stored items. Returns the conversation so far."""
    if not isinstance(body.input, str):
        body.input = [_find_item(item, stored.items) for item in body.input]
    if stored.history is None:
        return None
    return [from_json(item) for item in stored.history]


def _find_item(item: dict[str, object], stored: dict[str, bytes]) -> dict[str, object]:
    if read_kind(item) != "item_reference":
        return item
    content = stored.get(str(item.get("id")))
    return item if content is None else from_json(content)


def completion(content: bytes, context: Context) -> Generate:
    body, ignored = parse_openai_body(CompletionRequest, content, context)
    model = context.model
    facts = context.facts
    model.check_name(body.model)
    body.check(context.limits)
    params = body.sampling_params(model.defaults, max_tokens=body.max_tokens)
    wanted = params.structured_outputs
    grammar_text = "" if wanted is None else context.find_grammar(wanted)
    prompts = body.prompts()
    if len(prompts) * params.n > context.limits.choices:
        raise InvalidRequest(
            f"{len(prompts)} prompts times n = {params.n} is more than {context.limits.choices} choices", "prompt"
        )
    adds_special_tokens = body.add_special_tokens is not False
    all_ids = []
    echoes: list[Echo | None] = []
    if body.suffix:
        fill_in_middle = _find_fill_in_middle(context, "suffix")
        check_text(body.suffix, model, facts, truncated=False, param="suffix")
        params = _add_end_ids(params, fill_in_middle, context)
    for prompt in prompts:
        echo = None
        if body.suffix:
            if not isinstance(prompt, str):
                raise InvalidRequest("suffix needs a prompt that is a text", "suffix")
            check_text(prompt, model, facts, truncated=False, param="prompt")
            prompt = fill_in_middle.encode(prompt, body.suffix, model.tokenizer)
        elif isinstance(prompt, str):
            check_text(prompt, model, facts, params.truncate_prompt_tokens is not None, "prompt")
            if body.echo:
                has_offsets = adds_special_tokens and params.logprobs is not None
                echo = Echo(prompt, model.tokenizer.find_added_positions(prompt) if has_offsets else [])
            prompt = model.tokenizer.encode(prompt, add_special_tokens=adds_special_tokens)
        all_ids.append(prompt)
        echoes.append(echo)
    request = prepare(
        all_ids,
        params,
        model,
        facts,
        echo=echoes if body.echo else None,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        grammar=grammar_text,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    check_volume(request, context.limits, "prompt")
    return _generate(request, body, model, ignored)


def decide(content: bytes, context: Context) -> Generate:
    body, ignored = parse_lenient_body(DecisionRequest, content, context.limits)
    name = context.model.check_name(body.model)
    questions = body.to_questions(context.limits)
    messages, skipped = translate_items(None, body.input)
    if not messages:
        raise InvalidRequest("input must not be empty", "input")
    return Generate(
        request=prepare_questions(messages, questions, context),
        model=name,
        ignored_fields=join_ignored(ignored, skipped),
        echo={"questions": msgspec.to_builtins(questions)},
    )


def infill(content: bytes, context: Context) -> Generate:
    body, ignored = parse_lenient_body(InfillRequest, content, context.limits)
    model = context.model
    name = model.check_name(body.model)
    fill_in_middle = _find_fill_in_middle(context, "input_suffix")
    params = _add_end_ids(body.build_params(model.defaults, context.limits), fill_in_middle, context)
    files = [(extra.filename or "snippet", extra.text) for extra in body.input_extra or ()]
    prefix = body.input_prefix or ""
    suffix = body.input_suffix or ""
    beginning = body.prompt or ""
    whole = "".join((prefix, suffix, beginning, *(text for _, text in files)))
    check_text(whole, model, context.facts, truncated=False, param="input_prefix")
    ids = fill_in_middle.encode(prefix, suffix, model.tokenizer, files)
    ids += model.tokenizer.encode(beginning, add_special_tokens=False) if beginning else []
    try:
        request = prepare([ids], params, model, context.facts, param="input_prefix")
    except ContextTooLong as error:
        param = "n_predict" if error.param == "max_tokens" else error.param
        raise ContextTooLong(error.message.replace("max_tokens", "n_predict"), param) from None
    check_volume(request, context.limits, "input_prefix")
    return Generate(
        request=request,
        model=name,
        stream=bool(body.stream),
        ignored_fields=ignored,
    )


def _find_fill_in_middle(context: Context, param: str) -> FillInMiddle:
    """Raises Unsupported."""
    if context.model.fill_in_middle is None:
        raise Unsupported(f"{param} is not supported: this model has no tokens to fill in the middle", param)
    return context.model.fill_in_middle


def _add_end_ids(params: SamplingParams, fill_in_middle: FillInMiddle, context: Context) -> SamplingParams:
    """Add the ids that end such a text to the parameters."""
    end_ids = [end_id for end_id in fill_in_middle.end_ids if end_id < context.facts.vocab_size]
    return msgspec.structs.replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *end_ids])


def grammar(content: bytes, context: Context) -> Grammar:
    """content: from `encode_source`. An InvalidRequest is part of the result."""
    assert context.grammars is not None
    try:
        return Grammar(context.grammars.compile(decode_source(content)))
    except InvalidRequest as error:
        return Grammar(error=error.message, param=error.param)


def warm(content: bytes, context: Context) -> Text:
    """Load what is needed to compile grammars."""
    assert context.grammars is not None
    context.grammars.load_tokenizer()
    return Text("")


JOBS: dict[str, Callable[[bytes, Context], msgspec.Struct]] = {
    job.__name__: job
    for job in (
        chat,
        completion,
        messages,
        count_tokens,
        responses,
        stored_responses,
        input_tokens,
        stored_input_tokens,
        response_references,
        tokenize,
        detokenize,
        find_route,
        infill,
        decide,
        grammar,
        warm,
        embed,
        rerank,
        score,
        classify,
        pool,
    )
}


def _count_prompt(
    kind: type[CountTokensRequest] | type[InputTokensRequest], content: bytes, context: Context
) -> TokenCount:
    """Tokenize the prompt of a body."""
    body, ignored = parse_lenient_body(kind, content, context.limits)
    context.model.check_name(body.model)
    turn, skipped = body.to_turn(SamplingParams(), context.limits)
    return _count_turn(turn, context, join_ignored(ignored, skipped))


def _count_turn(turn: ChatTurn, context: Context, ignored: list[str]) -> TokenCount:
    text = render_turn(turn, context)
    ids = context.model.tokenizer.encode(text, add_special_tokens=False)
    return TokenCount(len(ids), ignored)


def _generate(
    request: TextRequest, body: SamplingBody, model: ServedModel, ignored_fields: list[str], opening_text: str = ""
) -> Generate:
    options = body.stream_options
    return Generate(
        request=request,
        model=model.check_name(body.model),
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        return_tokens_as_token_ids=bool(body.return_tokens_as_token_ids),
        return_metrics=bool(body.return_metrics),
        request_id=body.request_id or "",
        opening_text=opening_text,
        ignored_fields=ignored_fields,
    )
