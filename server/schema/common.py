"""What the bodies of several endpoints share, as pydantic models: the wire's shape, types only.

Ranges are checked by `SamplingParams` (the same for the offline `LLM`); here they only go into the documentation. A
null field is an absent field everywhere; an unknown one is an error.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from serve_llm.engine.limits import Limits
from serve_llm.server.errors import InvalidRequest, TooLarge
from serve_llm.server.prompt.params import LOGIT_BIAS, RANGES, SamplingParams

Body = TypeVar("Body", bound=BaseModel)

MAX_ENTRIES = 2**16


def _few(value: object) -> object:
    """Pydantic makes an error of every wrong entry, at a few microseconds each."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"more than {MAX_ENTRIES} entries")
    return value


def _token_key(key: str) -> int:
    """JSON's keys are strings; two of them must not mean the same token."""
    if not re.fullmatch(r"-?(0|[1-9]\d{0,18})", key, re.ASCII):
        raise ValueError("keys must be token ids")
    return int(key)


Ids = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenKey = Annotated[int, BeforeValidator(_token_key, json_schema_input_type=str)]
Biases = Annotated[dict[TokenKey, float], BeforeValidator(_few)]

Ignored = Annotated[object | None, Field(description="Accepted, because real clients send it; has no effect.")]


def ranged(name: str, description: str | None = None) -> Any:
    """An optional number whose documented range is that of `SamplingParams`."""
    allowed = RANGES[name]
    low = {"exclusiveMinimum" if allowed.above else "minimum": allowed.low}
    high = {} if allowed.high is None else {"maximum": allowed.high}
    return Field(default=None, description=description, json_schema_extra={**low, **high})


class RequestBody(BaseModel):
    """No silent conversions: "3" is not 3, true is not 1, and NaN is nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(RequestBody):
    include_usage: bool | None = Field(default=None, description="One more event before [DONE], with the usage.")
    continuous_usage_stats: bool | None = Field(default=None, description="The usage so far in every event.")
    include_obfuscation: Ignored = None


class SamplingBody(RequestBody):
    """Fields of completions and chat completions alike."""

    model: str | None = Field(default=None, description="A served model's name; the served model when absent.")
    n: int | None = ranged("n", "Choices per prompt.")
    temperature: float | None = ranged("temperature", "0 takes the likeliest token.")
    top_p: float | None = ranged("top_p")
    top_k: int | None = ranged("top_k", "0 and -1: off.")
    min_p: float | None = ranged("min_p")
    presence_penalty: float | None = ranged("presence_penalty")
    frequency_penalty: float | None = ranged("frequency_penalty")
    repetition_penalty: float | None = ranged("repetition_penalty")
    logit_bias: Biases | None = Field(
        default=None, description=f"Token id to bias, each {LOGIT_BIAS}; added to its logit."
    )
    seed: int | None = ranged("seed", "The same request and seed give the same tokens.")
    stop: str | Strings | None = Field(default=None, description="Strings that end the text.")
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = ranged("max_tokens")
    min_tokens: int | None = ranged("min_tokens")
    bad_words: Strings | None = None
    allowed_token_ids: Ids | None = None
    prompt_logprobs: int | None = ranged("prompt_logprobs")
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = ranged(
        "truncate_prompt_tokens", "Keep the prompt's last tokens only; -1: as many as fit."
    )
    return_token_ids: bool | None = Field(default=None, description="token_ids and prompt_token_ids in each choice.")
    priority: int | None = Field(default=None, description="Smaller goes first; between -2**31 and 2**31 - 1.")
    cache_salt: str | None = Field(default=None, description="Prefixes are shared between equal salts only.")
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, BeforeValidator(_few)] = None
    user: Ignored = None
    store: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    def check(self, limits: Limits) -> None:
        """What types cannot say. Raises InvalidRequest, Unsupported."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", "stream_options")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest("priority must fit into 32 bits", "priority")
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= 256:
            raise InvalidRequest("cache_salt must be 1 to 256 characters long", "cache_salt")
        if (self.n or 1) > limits.n:
            raise InvalidRequest(f"n must be at most {limits.n}, not {self.n}", "n")
        if len(self.logit_bias or ()) > limits.logit_bias:
            raise InvalidRequest(f"logit_bias may hold at most {limits.logit_bias} tokens", "logit_bias")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for name, words, most in (
            ("stop", stops, limits.stop_strings),
            ("bad_words", self.bad_words or [], limits.bad_words),
        ):
            if len(words) > most:
                raise InvalidRequest(f"{name} may hold at most {most} strings, not {len(words)}", name)
            if words and (longest := max(map(len, words))) > limits.stop_characters:
                raise InvalidRequest(
                    f"each string of {name} may be {limits.stop_characters} characters long, not {longest}", name
                )

    def sampling_params(self, defaults: dict[str, float], **given: int | None) -> SamplingParams:
        """The text-level parameters: what the client said, else the model's defaults, else OpenAI's.
        `given` overrides fields by name. Raises InvalidRequest."""
        fields = SamplingParams.__struct_fields__
        said = {name: value for name in fields if (value := getattr(self, name, None)) is not None}
        return SamplingParams(**{**defaults, **said, **given})


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One per prompt token, by token id; the first is null."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


def _check_depth(found: object, most: int) -> None:
    level = [found]
    for _ in range(most):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise InvalidRequest(f"the body holds more than {most} objects and lists inside each other")


def parse_body(kind: type[Body], content: bytes, limits: Limits) -> Body:
    """A request's body. Raises InvalidRequest that names the first field at fault, TooLarge."""
    if sum(map(content.count, b",[{")) > limits.json_values:
        raise TooLarge(f"the body holds more than {limits.json_values} values")
    try:
        found = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is malformed JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest("the body must be a JSON object")
    if content.count(b"{") + content.count(b"[") > limits.json_depth:
        _check_depth(found, limits.json_depth)
    for name in found:
        if name not in kind.model_fields:
            close = difflib.get_close_matches(name, kind.model_fields, n=1)
            raise InvalidRequest(f"unknown field {name}{f'; did you mean {close[0]}?' if close else ''}", name)
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
    param, problem = _path(problems[0]["loc"]), problems[0]["type"]
    if problem == "missing":
        raise InvalidRequest(f"{param} is required", param)
    if problem == "extra_forbidden":
        raise InvalidRequest(f"unknown field {param}", param)
    # A field that may have several types has one problem for each of them.
    reasons = dict.fromkeys(
        found["msg"].removeprefix("Value error, ") for found in problems if _path(found["loc"]) == param
    )
    raise InvalidRequest(f"{param}: {'; or: '.join(reasons)}", param)


def _path(place: tuple[int | str, ...]) -> str:
    """`messages[0].content` for ("messages", 0, "content", "str"): pydantic ends it with the type that it tried."""
    path = str(place[0])
    for part in place[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}"
        else:
            break
    return path
