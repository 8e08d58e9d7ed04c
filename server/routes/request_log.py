"""--enable-log-requests: one line for each request for text or vectors, once it has been parsed.

A line holds numbers and names. Texts that a client chose (prompts, stop strings, schemas, salts) are omitted or
counted. Only --max-log-len adds the beginnings of prompts. Generated text and keys are never logged.
"""

from __future__ import annotations

import logging

import msgspec
from starlette.requests import Request

from serve_llm.server.http.auth import TENANT
from serve_llm.server.http.request_id import REQUEST_ID
from serve_llm.server.prompt.tokenizer import Tokenizer
from serve_llm.server.prompt.validate import TextRequest

logger = logging.getLogger(__name__)

Parameters = dict[str, bool | int | float | str]

_KEY_DIGITS = 12  # enough to distinguish keys
_TOKENS_PER_CHARACTER = 4  # at most, in a vocabulary of bytes
_COUNTED = ("stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "logprob_token_ids")


class RequestLog:
    def __init__(self, tokenizer: Tokenizer, key_names: tuple[str, ...], max_characters: int | None) -> None:
        """key_names: digests of the API keys. max_characters: of each prompt that are logged; None: no text is."""
        self._tokenizer = tokenizer
        self._key_names = key_names
        self._max_characters = max_characters

    def write(self, http_request: Request, model: str, request: TextRequest, *, is_stream: bool = False) -> None:
        parameters = describe_parameters(request)
        if is_stream:
            parameters["stream"] = True
        path = http_request.url.path
        num_tokens = sum(map(len, request.prompts))
        fields: dict[str, object] = {
            "path": path,
            "model": model,
            "prompt_tokens": num_tokens,
            "parameters": parameters,
        }
        line = f"request {http_request.scope[REQUEST_ID]}: {path}, model {model}"
        tenant: int | None = http_request.scope.get(TENANT)
        if tenant is not None:
            fields["key"] = tenant
            fields["key_digest"] = self._key_names[tenant][:_KEY_DIGITS]
            line += f", key {tenant} ({fields['key_digest']})"
        line += f", {num_tokens} prompt tokens"
        line += "".join(f", {name} {value}" for name, value in parameters.items())
        if self._max_characters is not None:
            fields["prompts"] = [self._decode_beginning(ids, self._max_characters) for ids in request.prompts]
            line += f", prompts {fields['prompts']}"
        logger.info("%s", line, extra=fields)

    def _decode_beginning(self, ids: list[int], max_characters: int) -> str:
        beginning = ids[: _TOKENS_PER_CHARACTER * max_characters]
        return self._tokenizer.decode(beginning, skip_special_tokens=False)[:max_characters]


def describe_parameters(request: TextRequest) -> Parameters:
    """Describe the usual parameters with their effective values, and others that the request has set; lists by their
    lengths."""
    if request.pooling:
        return {}
    params = request.params
    described: Parameters = {
        "n": params.n,
        "max_tokens": max(sampling.max_tokens for sampling in request.samplings),
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    for field in msgspec.structs.fields(params):
        value = getattr(params, field.name)
        if field.name not in described and isinstance(value, bool | int | float) and value != field.default:
            described[field.name] = value
    if params.stop_strings:
        described["stop"] = len(params.stop_strings)
    for name in _COUNTED:
        if values := getattr(params, name):
            described[name] = len(values)
    if any(sampling.grammar for sampling in request.samplings):
        described["structured_outputs"] = True
    if request.priority:
        described["priority"] = request.priority
    return described
