"""Turn request bodies into validated requests: one function per kind of request, run by `prompt.pool`.

All work whose cost depends on client input happens here: parsing, templates, tokenizing, checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from serve_llm.server.http.anthropic_errors import reword_long_prompt
from serve_llm.server.http.errors import ContextTooLong, InvalidRequest, Unsupported
from serve_llm.server.prompt.chat_turn import count_prompt_tokens, drop_budget, prepare_turn
from serve_llm.server.prompt.context import JobContext, parse_openai_body
from serve_llm.server.prompt.decisions import prepare_questions
from serve_llm.server.prompt.fill_in_middle import FillInMiddle
from serve_llm.server.prompt.items import translate_items
from serve_llm.server.prompt.job_results import TokenCount, ValidGenerateRequest
from serve_llm.server.prompt.messages import read_text
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pooling_jobs import classify, embed, embed_cohere, pool, rerank, score
from serve_llm.server.prompt.response_jobs import (
    compact,
    input_tokens,
    response_references,
    responses,
    stored_compact,
    stored_input_tokens,
    stored_responses,
)
from serve_llm.server.prompt.text_jobs import DetokenizeResult, detokenize, find_route, tokenize
from serve_llm.server.prompt.validate import Echo, TextRequest, check_text, check_volume, prepare
from serve_llm.server.sampling_params import SamplingParams
from serve_llm.server.schema.chat import ChatRequest
from serve_llm.server.schema.common import SamplingBody, parse_lenient_body
from serve_llm.server.schema.completions import CompletionRequest
from serve_llm.server.schema.decisions import DecisionRequest
from serve_llm.server.schema.infill import InfillRequest
from serve_llm.server.schema.messages import CountTokensRequest, MessagesRequest
from serve_llm.server.schema.tools import list_custom_tools
from serve_llm.server.schema.unknown_fields import join_ignored
from serve_llm.server.structured_output.compiler import Grammar
from serve_llm.server.structured_output.turn_form import decode_source

_DEFAULT_MAX_TOKENS = 16  # OpenAI's, for completions


def chat(content: bytes, context: JobContext) -> ValidGenerateRequest:
    body, ignored = parse_openai_body(ChatRequest, content, context)
    context.model.check_name(body.model)
    body.check(context.limits)
    params = body.chat_params(context.model.defaults)
    ignored += body.ineffective_fields
    ignored += drop_budget(params, body.budget_hint, context.model)
    turn = body.to_turn(params, context.limits)
    ignored += turn.skipped
    _, request = prepare_turn(turn, context)
    opening_text = read_text(turn.messages[-1]) if body.echo and turn.messages[-1]["role"] == "assistant" else ""
    generate = _generate(request, body, context.model, ignored, opening_text)
    generate.tool_items = list_custom_tools(body.tools or [])
    return generate


def messages(content: bytes, context: JobContext) -> ValidGenerateRequest:
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
    return ValidGenerateRequest(
        request=request,
        model=model,
        stream=bool(body.stream),
        include_usage=True,
        continuous_usage=True,
        omits_thinking=body.omits_thinking,
        is_cut_by_context=request.samplings[0].max_tokens < body.max_tokens,
        is_compaction=body.compaction is not None,
        ignored_fields=join_ignored(ignored, skipped),
    )


def count_tokens(content: bytes, context: JobContext) -> TokenCount:
    body, ignored = parse_lenient_body(CountTokensRequest, content, context.limits)
    context.model.check_name(body.model)
    turn, skipped = body.to_turn(SamplingParams(), context.limits)
    return TokenCount(count_prompt_tokens(turn, context), join_ignored(ignored, skipped))


def completion(content: bytes, context: JobContext) -> ValidGenerateRequest:
    body, ignored = parse_openai_body(CompletionRequest, content, context)
    model = context.model
    model_info = context.model_info
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
        check_text(body.suffix, model, model_info, truncated=False, param="suffix")
        params = _add_end_ids(params, fill_in_middle, context)
    for prompt in prompts:
        echo = None
        if body.suffix:
            if not isinstance(prompt, str):
                raise InvalidRequest("suffix needs a prompt that is a text", "suffix")
            check_text(prompt, model, model_info, truncated=False, param="prompt")
            prompt = fill_in_middle.encode(prompt, body.suffix, model.tokenizer)
        elif isinstance(prompt, str):
            check_text(prompt, model, model_info, params.truncate_prompt_tokens is not None, "prompt")
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
        model_info,
        echo=echoes if body.echo else None,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        grammar=grammar_text,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    check_volume(request, context.limits, "prompt")
    return _generate(request, body, model, ignored)


def decide(content: bytes, context: JobContext) -> ValidGenerateRequest:
    body, ignored = parse_lenient_body(DecisionRequest, content, context.limits)
    name = context.model.check_name(body.model)
    questions = body.to_questions(context.limits)
    messages, skipped = translate_items(None, body.read_input())
    if not messages:
        raise InvalidRequest("input must not be empty", "input")
    return ValidGenerateRequest(
        request=prepare_questions(messages, questions, context),
        model=name,
        ignored_fields=join_ignored(ignored, skipped),
        echo={"questions": msgspec.to_builtins(questions)},
    )


def infill(content: bytes, context: JobContext) -> ValidGenerateRequest:
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
    check_text(whole, model, context.model_info, truncated=False, param="input_prefix")
    ids = fill_in_middle.encode(prefix, suffix, model.tokenizer, files)
    ids += model.tokenizer.encode(beginning, add_special_tokens=False) if beginning else []
    try:
        request = prepare([ids], params, model, context.model_info, param="input_prefix")
    except ContextTooLong as error:
        param = "n_predict" if error.param == "max_tokens" else error.param
        raise ContextTooLong(error.message.replace("max_tokens", "n_predict"), param) from None
    check_volume(request, context.limits, "input_prefix")
    return ValidGenerateRequest(
        request=request,
        model=name,
        stream=bool(body.stream),
        ignored_fields=ignored,
    )


def _find_fill_in_middle(context: JobContext, param: str) -> FillInMiddle:
    """Raises Unsupported."""
    if context.model.fill_in_middle is None:
        raise Unsupported(f"{param} is not supported: this model has no tokens to fill in the middle", param)
    return context.model.fill_in_middle


def _add_end_ids(params: SamplingParams, fill_in_middle: FillInMiddle, context: JobContext) -> SamplingParams:
    """Add the ids that end such a text to the parameters."""
    end_ids = [end_id for end_id in fill_in_middle.end_ids if end_id < context.model_info.vocab_size]
    return msgspec.structs.replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *end_ids])


def grammar(content: bytes, context: JobContext) -> Grammar:
    """content: from `encode_source`. An InvalidRequest is part of the result."""
    assert context.grammars is not None
    try:
        return Grammar(context.grammars.compile(decode_source(content)))
    except InvalidRequest as error:
        return Grammar(error=error.message, param=error.param)


def warm(content: bytes, context: JobContext) -> DetokenizeResult:
    """Load what is needed to compile grammars."""
    assert context.grammars is not None
    context.grammars.load_tokenizer()
    return DetokenizeResult("")


JOBS: dict[str, Callable[[bytes, JobContext], msgspec.Struct]] = {
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
        compact,
        stored_compact,
        response_references,
        tokenize,
        detokenize,
        find_route,
        infill,
        decide,
        grammar,
        warm,
        embed,
        embed_cohere,
        rerank,
        score,
        classify,
        pool,
    )
}


def _generate(
    request: TextRequest, body: SamplingBody, model: ServedModel, ignored_fields: list[str], opening_text: str = ""
) -> ValidGenerateRequest:
    options = body.stream_options
    return ValidGenerateRequest(
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
