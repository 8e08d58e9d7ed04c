"""Convert text-level parameters to the id-level `Sampling` that the engine trusts, or raise an error that names the
invalid field.

All checks here depend on the model: vocabulary, context length, tokenizer. `SamplingParams` checks ranges.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import msgspec

from serve_llm.common.options.limits import Limits
from serve_llm.common.types import GREEDY_BELOW, Adapter, ModelInfo, Sampling, ThinkingBudget
from serve_llm.server.dialects.tool import Tool
from serve_llm.server.http.errors import ContextTooLong, InvalidRequest, Unsupported
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.sampling_params import SamplingParams

# All pooling requests have these and generate nothing: sampling parameters take time to check, and seeds to draw.
_POOLING_PARAMS = SamplingParams(max_tokens=0, seed=0)
_POOLING_SAMPLING = Sampling(max_tokens=0, seed=0)


class ReplyFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How to parse the text of a chat turn with the model's dialect."""

    tools: str  # JSON of the list of Tool that may be called; a schema may hold integers that msgpack cannot write
    in_reasoning: bool  # whether the prompt has opened the reasoning
    include_reasoning: bool
    has_named_tool: bool  # whether the request names the function to call
    requires_call: bool  # whether a grammar allows only calls after the reasoning
    content_has_form: bool  # whether a grammar constrains the content
    num_previous_calls: int  # tool calls in the conversation so far

    def read_tools(self) -> list[Tool]:
        return msgspec.convert(json.loads(self.tools), list[Tool])


class Echo(msgspec.Struct):
    """The text of a prompt, to repeat before its choices."""

    text: str
    added_positions: list[int] = []  # positions in the prompt's ids of tokens that the tokenizer added to the text


class TextRequest(msgspec.Struct, kw_only=True):
    """A request that the engine can accept: text-level `params`, and one `Sampling` per prompt."""

    prompts: list[list[int]]  # ids, cut by truncate_prompt_tokens
    samplings: list[Sampling]  # for choice 0 of each prompt; seed 0 if `params.seed` is None
    params: SamplingParams
    end_ids: tuple[int, ...] = ()  # the model's own stop ids, unless `params.ignore_eos`
    echoes: list[Echo] | None = None  # one per prompt
    reply: ReplyFormat | None = None  # None: all text is content
    priority: int = 0
    cache_salt: str = ""
    adapter: Adapter | None = None  # set when the request is submitted
    pooling: bool = False  # the result is a vector of each prompt
    pools_tokens: bool = False  # with `pooling`: the result is a vector of each token
    second_text_starts: list[int | None] | None = None  # one per prompt; see `EngineCoreRequest.second_text_start`


def check_text(
    text: str, model: ServedModel, model_info: ModelInfo, truncated: bool, param: str, subject: str = "the prompt"
) -> None:
    """Before tokenizing, refuse a text that cannot fit whatever its tokens are. Raises ContextTooLong."""
    if model.tokenizer.longest_token is None:
        return
    at_least = -(-len(text) // model.tokenizer.longest_token)
    if at_least > model_info.max_model_len and not truncated:
        raise ContextTooLong(
            f"{subject} has at least {at_least} tokens, but the context length is {model_info.max_model_len} tokens",
            param,
            (at_least, model_info.max_model_len - 1),
        )


def prepare(
    prompts: list[list[int]],
    params: SamplingParams,
    model: ServedModel,
    model_info: ModelInfo,
    *,
    param: str = "prompt",
    echo: Sequence[Echo | None] | None = None,
    default_max_tokens: int | None = None,
    end_ids: tuple[int, ...] | None = None,
    grammar: str = "",
    reply: ReplyFormat | None = None,
    thinking: ThinkingBudget | None = None,
    priority: int = 0,
    cache_salt: str = "",
) -> TextRequest:
    """Check a request against the model. Raises InvalidRequest.

    param: the field that holds the prompts. echo: put each prompt before its choices and their logprobs, as the text
    that the client sent or, if None, as the decoded ids. default_max_tokens: upper bound if `params.max_tokens` is
    None. end_ids: ids that end the text (default: the model's `eos_ids`). grammar: compiled from
    `params.structured_outputs`. reply: how to parse the text. thinking: `params.thinking_token_budget` in terms of ids.
    """
    if not model_info.generates:
        raise Unsupported(f"this model ({model_info.architecture}) returns vectors and generates no text")
    if thinking is None and params.thinking_token_budget not in (None, -1):
        raise Unsupported(
            "thinking_token_budget needs a conversation, and a model whose reasoning format is known",
            "thinking_token_budget",
        )
    _check_named_ids(params, model_info.vocab_size)
    suppressed = tuple((token_id,) for token_id in model.suppressed_ids if token_id < model_info.vocab_size)
    bad_words_ids = _bad_words_ids(params.bad_words or [], model) + suppressed
    end_ids = tuple(end_id for end_id in end_ids or model.eos_ids if end_id < model_info.vocab_size)
    truncated = []
    samplings = []
    for prompt in prompts:
        ids = _truncate(prompt, params, model_info)
        max_tokens = _max_tokens(len(ids), params, model_info.max_model_len, param)
        if params.max_tokens is None and default_max_tokens is not None:
            max_tokens = min(max_tokens, max(default_max_tokens, params.min_tokens))
        _check_ids(ids, model_info.vocab_size, param)
        truncated.append(ids)
        sampling = _sampling(params, max_tokens, bad_words_ids, end_ids, model_info.vocab_size)
        if grammar or thinking is not None:
            sampling = msgspec.structs.replace(sampling, grammar=grammar, thinking=thinking)
        samplings.append(sampling)
    echoes = None
    if echo is not None:
        if params.logprob_token_ids:
            raise InvalidRequest("logprob_token_ids and echo exclude each other", "logprob_token_ids")
        echoes = _complete_echoes(echo, prompts, truncated, model)
        if params.logprobs is not None:
            num_logprobs = max(params.logprobs, params.prompt_logprobs or 0)
            samplings = [msgspec.structs.replace(sampling, prompt_logprobs=num_logprobs) for sampling in samplings]
    if grammar:  # which says it all; a schema may hold integers that msgpack cannot write
        params = msgspec.structs.replace(params, structured_outputs=None)
    return TextRequest(
        prompts=truncated,
        samplings=samplings,
        params=params,
        end_ids=end_ids,
        echoes=echoes,
        reply=reply,
        priority=priority,
        cache_salt=cache_salt,
    )


def _complete_echoes(
    echo: Sequence[Echo | None], prompts: list[list[int]], truncated: list[list[int]], model: ServedModel
) -> list[Echo]:
    """Return the texts of the prompts. truncated: the ids of each that are computed. See `prepare`."""
    return [
        one
        if one is not None and len(ids) == len(prompt)
        else Echo(model.tokenizer.decode(ids, skip_special_tokens=False))
        for one, ids, prompt in zip(echo, truncated, prompts, strict=True)
    ]


def prepare_pooling(
    prompts: list[list[int]],
    model_info: ModelInfo,
    *,
    places: Sequence[str],
    second_text_starts: list[int | None] | None = None,
    priority: int = 0,
    cache_salt: str = "",
) -> TextRequest:
    """Check the prompts of a pooling request against the model. Raises InvalidRequest.

    places: what holds each prompt, as errors name it: `documents[1]`.
    """
    for place, ids in zip(places, prompts, strict=True):
        param = read_field(place)
        if not ids:
            raise InvalidRequest(f"{place} has no tokens", param)
        if len(ids) > model_info.max_model_len:
            raise ContextTooLong(
                f"{place} has {len(ids)} tokens, but the context length is {model_info.max_model_len} tokens; "
                "shorten it, or set truncate_prompt_tokens",
                param,
            )
        _check_ids(ids, model_info.vocab_size, param)
    return TextRequest(
        prompts=prompts,
        samplings=[_POOLING_SAMPLING] * len(prompts),
        params=_POOLING_PARAMS,
        priority=priority,
        cache_salt=cache_salt,
        pooling=True,
        second_text_starts=second_text_starts,
    )


def read_field(place: str) -> str:
    """`documents` of `documents[1]`."""
    return place.partition("[")[0]


def check_volume(request: TextRequest, limits: Limits, param: str) -> None:
    """Refuse a request whose tokens or logprobs would need too much memory. Raises InvalidRequest."""
    num_ids = 0
    num_logprobs = 0
    for ids, sampling in zip(request.prompts, request.samplings, strict=True):
        num_ids += len(ids) + len(sampling.logit_bias) + len(sampling.allowed_token_ids)
        num_ids += sum(map(len, sampling.bad_words_ids))
        num_ids += len(request.params.stop_token_ids or ()) + len(sampling.grammar) // 4
        if sampling.logprobs is not None:
            num_logprobs += sampling.max_tokens * (sampling.logprobs + len(sampling.logprob_token_ids) + 1)
        if sampling.prompt_logprobs is not None:
            num_logprobs += len(ids) * (sampling.prompt_logprobs + 1)
    n = request.params.n
    if num_ids * n > limits.prompt_tokens:
        raise InvalidRequest(
            f"prompts and other lists of tokens, times n, are {num_ids * n} tokens, more than {limits.prompt_tokens}",
            param,
        )
    if num_logprobs * n > limits.logprobs:
        raise InvalidRequest(
            f"up to {num_logprobs * n} log-probabilities are asked for, more than {limits.logprobs}: ask for fewer "
            "tokens, choices or logprobs",
            "logprobs",
        )


def _check_named_ids(params: SamplingParams, vocab_size: int) -> None:
    """Check the ids in the parameters."""
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logprob_token_ids", params.logprob_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        if ids and len(ids) > vocab_size:
            raise InvalidRequest(f"{name} has more entries than the vocabulary", name)
        _check_ids(ids or (), vocab_size, name)


def _check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    if not ids:
        return
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{param}: the vocabulary has no token {token_id}, only 0 to {vocab_size - 1}", param)


def _truncate(ids: list[int], params: SamplingParams, model_info: ModelInfo) -> list[int]:
    keep = params.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == -1:
        room = 1 if params.max_tokens is None else params.max_tokens
        keep = max(1, model_info.max_model_len - room)
    return ids[:keep] if params.truncation_side == "right" else ids[-keep:]


def _max_tokens(num_prompt: int, params: SamplingParams, max_model_len: int, param: str) -> int:
    """Return how many tokens may follow the prompt. Raises ContextTooLong with the numbers if the request does not
    fit."""
    if num_prompt == 0:
        raise InvalidRequest(f"{param} has no tokens", param)
    room = max_model_len - num_prompt
    if room < 0 or (room == 0 and params.max_tokens != 0):
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens, but the context length is {max_model_len} tokens, which prompt and "
            "generated text share",
            param,
            (num_prompt, max_model_len - 1),
        )
    if params.max_tokens is None:
        if params.min_tokens > room:
            raise ContextTooLong(
                f"min_tokens ({params.min_tokens}) is more than the {room} tokens that the prompt of {num_prompt} "
                f"tokens leaves of the context length of {max_model_len}",
                "min_tokens",
            )
        return room
    if params.max_tokens > room:
        raise ContextTooLong(
            f"the prompt of {num_prompt} tokens and max_tokens ({params.max_tokens}) together exceed the context "
            f"length of {max_model_len} tokens",
            "max_tokens",
        )
    return params.max_tokens


def _bad_words_ids(words: list[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Tokenize each word as at the beginning of a text and as after a space."""
    all_ids: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            all_ids[tuple(model.tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(ids for ids in all_ids if ids)


def _sampling(
    params: SamplingParams,
    max_tokens: int,
    bad_words_ids: tuple[tuple[int, ...], ...],
    end_ids: tuple[int, ...],
    vocab: int,
) -> Sampling:
    ending_ids = () if params.ignore_eos else end_ids
    return Sampling(
        max_tokens=max_tokens,
        seed=(params.seed or 0) % 2**64,
        temperature=params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
        top_p=params.top_p or 1.0,
        top_k=min(max(params.top_k, 0), vocab) if params.top_p else 1,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias or {},
        allowed_token_ids=tuple(dict.fromkeys(params.allowed_token_ids or ())),
        bad_words_ids=bad_words_ids,
        stop_token_ids=tuple(dict.fromkeys([*(params.stop_token_ids or ()), *ending_ids])),
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
        logprob_token_ids=tuple(dict.fromkeys(params.logprob_token_ids or ())),
        prompt_logprobs=params.prompt_logprobs,
    )
