"""From the bytes of a body to what is to be done: each kind of request as one function, in this process or another.

Everything that costs time for what a client sent happens here: parsing, template, tokenizing, checks. No FastAPI.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from serve_llm.engine.limits import Limits
from serve_llm.engine.types import ModelFacts
from serve_llm.server.errors import ContextTooLong, InvalidRequest, Unsupported
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.template import ChatTemplate
from serve_llm.server.prompt.validate import TextRequest, check_text, check_volume, prepare
from serve_llm.server.schema.chat import ChatMessage, ChatRequest, TemplateBody
from serve_llm.server.schema.common import SamplingBody, parse_body
from serve_llm.server.schema.completions import CompletionRequest
from serve_llm.server.schema.tokenize import DetokenizeRequest, TokenizeRequest

_DEFAULT_MAX_TOKENS = 16  # OpenAI's, for completions


class NotHere(Exception):
    """What the body asks for runs only in a process that can be killed."""


class Context(NamedTuple):
    """What a job knows besides the body."""

    model: ServedModel
    facts: ModelFacts
    limits: Limits
    trusts_templates: bool = False  # requests may bring their own
    is_apart: bool = False  # this is such a process


class Generate(msgspec.Struct, kw_only=True):
    """A completion or chat completion that will be accepted."""

    request: TextRequest
    model: str  # the name to answer with
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool


class Tokens(msgspec.Struct):
    ids: list[int]
    texts: list[str] | None = None  # of each


class Text(msgspec.Struct):
    text: str


def chat(content: bytes, context: Context) -> Generate:
    body = parse_body(ChatRequest, content, context.limits)
    model, facts = context.model, context.facts
    model.check_name(body.model)
    body.check(context.limits)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = body.sampling_params(model.defaults, max_tokens=max_tokens, logprobs=body.num_logprobs)
    text = _render(body, body.messages, context)
    check_text(text, model, facts, params.truncate_prompt_tokens is not None, "messages")
    # The template writes the special tokens itself.
    ids = model.tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
    try:
        request = prepare(
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
    check_volume(request, context.limits, "messages")
    return _generate(request, body, model)


def completion(content: bytes, context: Context) -> Generate:
    body = parse_body(CompletionRequest, content, context.limits)
    model, facts = context.model, context.facts
    model.check_name(body.model)
    body.check(context.limits)
    params = body.sampling_params(model.defaults, max_tokens=body.max_tokens)
    prompts = body.prompts()
    if len(prompts) * params.n > context.limits.choices:
        raise InvalidRequest(
            f"{len(prompts)} prompts times n = {params.n} is more than {context.limits.choices} choices", "prompt"
        )
    all_ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text(prompt, model, facts, params.truncate_prompt_tokens is not None, "prompt")
            prompt = model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
        all_ids.append(prompt)
    request = prepare(
        all_ids,
        params,
        model,
        facts,
        echo=[prompt if isinstance(prompt, str) else None for prompt in prompts] if body.echo else None,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    check_volume(request, context.limits, "prompt")
    return _generate(request, body, model)


def tokenize(content: bytes, context: Context) -> Tokens:
    body = parse_body(TokenizeRequest, content, context.limits)
    context.model.check_name(body.model)
    body.check(context.limits)
    tokenizer = context.model.tokenizer
    if body.messages is not None:
        text, special = _render(body, body.messages, context), bool(body.add_special_tokens)
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
    ids = tokenizer.encode(text, add_special_tokens=special)
    return Tokens(ids, [tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None)


def detokenize(content: bytes, context: Context) -> Text:
    body = parse_body(DetokenizeRequest, content, context.limits)
    context.model.check_name(body.model)
    vocab_size = context.facts.vocab_size
    if body.tokens and not 0 <= min(body.tokens) <= max(body.tokens) < vocab_size:
        raise InvalidRequest(f"tokens must be ids from 0 to {vocab_size - 1}", "tokens")
    return Text(context.model.tokenizer.decode(body.tokens, skip_special_tokens=False))


JOBS: dict[str, Callable[[bytes, Context], msgspec.Struct]] = {
    job.__name__: job for job in (chat, completion, tokenize, detokenize)
}


def _render(body: TemplateBody, messages: list[ChatMessage], context: Context) -> str:
    """The prompt's text, by the checkpoint's template, or by the request's own where that is allowed."""
    template = context.model.template
    if body.chat_template is not None:
        if not context.trusts_templates:
            raise Unsupported("chat_template needs a server with --trust-request-chat-template", "chat_template")
        if not context.is_apart:
            raise NotHere
        template = ChatTemplate.of_request(body.chat_template, context.model.tokenizer.named_tokens)
    return body.render(template, messages, context.limits.template_characters)


def _generate(request: TextRequest, body: SamplingBody, model: ServedModel) -> Generate:
    options = body.stream_options
    return Generate(
        request=request,
        model=model.check_name(body.model),
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
    )
