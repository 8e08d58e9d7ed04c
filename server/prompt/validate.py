"""From a text-level request to the id-level `Sampling` that the engine trusts, or an error that names the parameter.

Everything here depends on the model: vocabulary, context length, tokenizer. Ranges are `params`' business.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from serve_llm.engine.limits import Limits
from serve_llm.engine.types import ModelFacts, Sampling
from serve_llm.server.errors import ContextTooLong, InvalidRequest
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.params import SamplingParams

_GREEDY_BELOW = 1e-5  # a temperature that divides logits into infinities


class TextRequest(msgspec.Struct, kw_only=True):
    """A request that will be accepted by the engine. Text-level `params`, and one `Sampling` per prompt."""

    prompts: list[list[int]]  # ids, cut by truncate_prompt_tokens
    samplings: list[Sampling]  # of choice 0 of each prompt; seed 0 where `params.seed` is None
    params: SamplingParams
    echoes: list[str] | None = None  # what to put in front of each prompt's choices
    priority: int = 0
    cache_salt: str = ""


def check_text(text: str, model: ServedModel, facts: ModelFacts, truncated: bool, param: str) -> None:
    """Refuses, before any work is spent on it, a text that cannot fit whatever its tokens are."""
    at_least = -(-len(text) // model.tokenizer.longest_token)
    if at_least > facts.max_model_len and not truncated:
        raise ContextTooLong(
            f"the prompt has at least {at_least} tokens, but the context length is {facts.max_model_len} tokens", param
        )


def prepare(
    prompts: list[list[int]],
    params: SamplingParams,
    model: ServedModel,
    facts: ModelFacts,
    *,
    param: str = "prompt",
    echo: Sequence[str | None] | None = None,
    default_max_tokens: int | None = None,
    priority: int = 0,
    cache_salt: str = "",
) -> TextRequest:
    """Checks everything against the model. Raises InvalidRequest.

    `param`: the field that the prompts came from. `echo`: put each prompt in front of its choices and their logprobs,
    as the text that the client sent or, for None, as the ids' text. `default_max_tokens`: where `params.max_tokens` is
    None, no more than that, even if there is room.
    """
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        if ids and len(ids) > facts.vocab_size:
            raise InvalidRequest(f"{name} has more entries than the vocabulary", name)
        _check_ids(ids or (), facts.vocab_size, name)
    bad_words_ids = _bad_words_ids(params.bad_words or [], model)
    cut, samplings = [], []
    for whole in prompts:
        ids = _truncated(whole, params, facts)
        max_tokens = _max_tokens(len(ids), params, facts.max_model_len, param)
        if params.max_tokens is None and default_max_tokens is not None:
            max_tokens = min(max_tokens, max(default_max_tokens, params.min_tokens))
        _check_ids(ids, facts.vocab_size, param)
        cut.append(ids)
        samplings.append(_sampling(params, max_tokens, bad_words_ids, model, facts.vocab_size))
    echoes = None
    if echo is not None:
        echoes = [
            model.tokenizer.decode(ids, params.skip_special_tokens) if text is None or len(ids) < len(whole) else text
            for text, ids, whole in zip(echo, cut, prompts, strict=True)
        ]
        if params.logprobs is not None:
            wanted = max(params.logprobs, params.prompt_logprobs or 0)
            samplings = [msgspec.structs.replace(sampling, prompt_logprobs=wanted) for sampling in samplings]
    return TextRequest(
        prompts=cut,
        samplings=samplings,
        params=params,
        echoes=echoes,
        priority=priority,
        cache_salt=cache_salt,
    )


def check_volume(request: TextRequest, limits: Limits, param: str) -> None:
    """Refuses what would take too much memory on its way to the engine and back. Raises InvalidRequest."""
    num_ids = num_logprobs = 0
    for ids, one in zip(request.prompts, request.samplings, strict=True):
        num_ids += len(ids) + len(one.logit_bias) + len(one.allowed_token_ids) + sum(map(len, one.bad_words_ids))
        num_ids += len(request.params.stop_token_ids or ())
        if one.logprobs is not None:
            num_logprobs += one.max_tokens * (one.logprobs + 1)
        if one.prompt_logprobs is not None:
            num_logprobs += len(ids) * (one.prompt_logprobs + 1)
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


def _check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    if not ids:
        return
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{param}: the vocabulary has no token {token_id}, only 0 to {vocab_size - 1}", param)


def _truncated(ids: list[int], params: SamplingParams, facts: ModelFacts) -> list[int]:
    keep = params.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == -1:
        room = 1 if params.max_tokens is None else params.max_tokens
        keep = max(1, facts.max_model_len - room)
    return ids[-keep:]


def _max_tokens(num_prompt: int, params: SamplingParams, max_model_len: int, param: str) -> int:
    """How many tokens may follow a prompt. Raises ContextTooLong with the numbers when it does not fit."""
    if num_prompt == 0:
        raise InvalidRequest(f"{param} has no tokens", param)
    room = max_model_len - num_prompt
    if room < 0 or (room == 0 and params.max_tokens != 0):
        raise ContextTooLong(
            f"the prompt has {num_prompt} tokens, but the context length is {max_model_len} tokens, which prompt and "
            "generated text share",
            param,
        )
    if params.max_tokens is None:
        if params.min_tokens > room:
            raise ContextTooLong(
                f"min_tokens ({params.min_tokens}) is more than the {room} tokens that the prompt's {num_prompt} leave "
                f"of the context length of {max_model_len}",
                "min_tokens",
            )
        return room
    if params.max_tokens > room:
        raise ContextTooLong(
            f"the prompt's {num_prompt} tokens and max_tokens ({params.max_tokens}) are together more than the context "
            f"length of {max_model_len} tokens",
            "max_tokens",
        )
    return params.max_tokens


def _bad_words_ids(words: list[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at a text's beginning and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            found[tuple(model.tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(ids for ids in found if ids)


def _sampling(
    params: SamplingParams, max_tokens: int, bad_words_ids: tuple[tuple[int, ...], ...], model: ServedModel, vocab: int
) -> Sampling:
    eos_ids = () if params.ignore_eos else tuple(eos_id for eos_id in model.eos_ids if eos_id < vocab)
    return Sampling(
        max_tokens=max_tokens,
        seed=(params.seed or 0) % 2**64,
        temperature=params.temperature if params.temperature >= _GREEDY_BELOW else 0.0,
        top_p=params.top_p,
        top_k=min(max(params.top_k, 0), vocab),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias or {},
        allowed_token_ids=tuple(dict.fromkeys(params.allowed_token_ids or ())),
        bad_words_ids=bad_words_ids,
        stop_token_ids=tuple(dict.fromkeys((*(params.stop_token_ids or ()), *eos_ids))),
        min_tokens=params.min_tokens,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )
