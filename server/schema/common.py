"""Pydantic models that the bodies of several endpoints share, and the parser of request bodies.

The models check types; `SamplingParams` checks ranges, which appear here only in the OpenAPI documentation. A null
field counts as absent; an unknown field is an error.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.sampling_params import (
    LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    PATTERN_SIZE,
    RANGES,
    REPETITIONS,
    Range,
    RepetitionDetection,
    SamplingParams,
)
from serve_llm.server.schema.json_text import read_fields
from serve_llm.server.schema.structured_output import ResponseFormat, StructuredOutputsField
from serve_llm.server.schema.unknown_fields import find_nested_unknown
from serve_llm.server.schema.whole_numbers import convert_whole_floats
from serve_llm.server.structured_output.params import StructuredOutputs

Body = TypeVar("Body", bound=BaseModel)

MAX_ENTRIES = 2**16
_MAX_METADATA = 16
_MAX_METADATA_KEY = 64  # characters, as in OpenAI's API
_MAX_METADATA_VALUE = 512


def _limit_entries(value: object) -> object:
    """Refuse huge objects early: pydantic spends microseconds on every wrong entry."""
    if isinstance(value, dict) and len(value) > MAX_ENTRIES:
        raise ValueError(f"more than {MAX_ENTRIES} entries")
    return value


def _token_key(key: str) -> int:
    """Parse a token id from a JSON key. Only the canonical spelling is valid, so that no two keys name the same
    token."""
    if not re.fullmatch(r"-?(0|[1-9]\d{0,18})", key, re.ASCII):
        raise ValueError("keys must be token ids")
    return int(key)


Ids = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]
TokenKey = Annotated[int, BeforeValidator(_token_key, json_schema_input_type=str)]
Biases = Annotated[dict[TokenKey, float], BeforeValidator(_limit_entries)]

RequestId = Annotated[str, Field(max_length=128, pattern=r"^[!-~]+$", description="Part of the response's id.")]

Ignored = Annotated[object | None, Field(description="Accepted, because real clients send it; has no effect.")]


def check_metadata(metadata: dict[str, str]) -> None:
    """Check texts that are stored and returned unchanged. Raises InvalidRequest."""
    if len(metadata) > _MAX_METADATA:
        raise InvalidRequest(f"metadata may have {_MAX_METADATA} entries, not {len(metadata)}", "metadata")
    for key, value in metadata.items():
        if len(key) > _MAX_METADATA_KEY or len(value) > _MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"metadata: keys may have {_MAX_METADATA_KEY} characters, and values {_MAX_METADATA_VALUE}", "metadata"
            )


def check_cache_salt(salt: str | None) -> None:
    """Raises InvalidRequest."""
    if salt is not None and not 0 < len(salt) <= 256:
        raise InvalidRequest("cache_salt must be 1 to 256 characters long", "cache_salt")


def ranged(name: str, description: str | None = None) -> Any:
    """An optional number whose documented range is that of `SamplingParams`."""
    return bounded(RANGES[name], description, default=None)


def bounded(allowed: Range, description: str | None, default: object = ...) -> Any:
    """A number whose range is documented, and checked elsewhere."""
    low = {"exclusiveMinimum" if allowed.above else "minimum": allowed.low}
    high = {} if allowed.high is None else {"maximum": allowed.high}
    return Field(default=default, description=description, json_schema_extra={**low, **high})


class RequestBody(BaseModel):
    """Strict: "3" is not 3, true is not 1, and NaN is refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def explain_unknown(cls, name: str) -> str | None:
        """Explain why there is no such field, if a client may expect it; None if there is no reason to."""
        return None


class TranslatedBody(BaseModel):
    """A body of another API: strict in its values; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class StreamOptions(RequestBody):
    include_usage: bool | None = Field(default=None, description="Send one more event, with the usage, before [DONE].")
    continuous_usage_stats: bool | None = Field(default=None, description="Send the usage so far in every event.")
    include_obfuscation: Ignored = None


class RepetitionDetectionOptions(RequestBody):
    max_pattern_size: int = bounded(PATTERN_SIZE, "Tokens of the longest pattern.")
    min_pattern_size: int | None = bounded(PATTERN_SIZE, "Tokens of the shortest pattern; 1 when absent.", default=None)
    min_count: int = bounded(REPETITIONS, "How many times in a row the pattern must occur at the end.")

    def to_params(self) -> RepetitionDetection:
        """Raises InvalidRequest."""
        return RepetitionDetection(
            max_pattern_size=self.max_pattern_size,
            min_pattern_size=1 if self.min_pattern_size is None else self.min_pattern_size,
            min_count=self.min_count,
        )


class SamplingBody(RequestBody):
    """Fields that completions and chat completions share."""

    model: str | None = Field(default=None, description="A served model's name; the served model when absent.")
    n: int | None = ranged("n", "Choices per prompt.")
    best_of: int | None = Field(default=None, description="Refused at other values than 1 and n.")
    temperature: float | None = ranged("temperature", "0 takes the most likely token.")
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
    logprob_token_ids: Ids | None = Field(
        default=None,
        description=f"At most {MAX_LOGPROB_TOKEN_IDS} ids whose log-probabilities follow those of the most "
        "likely tokens. Requires logprobs.",
    )
    prompt_logprobs: int | None = ranged("prompt_logprobs")
    structured_outputs: StructuredOutputsField = Field(
        default=None, description="The form of the text: one of json, regex, choice, grammar, json_object."
    )
    response_format: ResponseFormat | None = Field(default=None, description="The form of the text.")
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = ranged(
        "truncate_prompt_tokens", "Keep only this many of the prompt's last tokens; -1: as many as fit."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        default=None, description="The side on which truncate_prompt_tokens cuts; left when absent."
    )
    repetition_detection: RepetitionDetectionOptions | None = Field(
        default=None, description="End a text that repeats itself, with finish_reason repetition."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="Tokens of logprobs as token_id:<id> instead of their text."
    )
    return_metrics: bool | None = Field(default=None, description="Times of the request in the response, as metrics.")
    request_id: RequestId | None = None
    return_token_ids: bool | None = Field(default=None, description="token_ids in each choice, and prompt_token_ids.")
    priority: int | None = Field(default=None, description="Smaller values run first; between -2**31 and 2**31 - 1.")
    cache_salt: str | None = Field(default=None, description="Prefixes are shared between equal salts only.")
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, BeforeValidator(_limit_entries)] = None
    user: Ignored = None
    store: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None

    def check(self, limits: Limits) -> None:
        """Check what types cannot express. Raises InvalidRequest, Unsupported."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", "stream_options")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest("priority must fit into 32 bits", "priority")
        check_cache_salt(self.cache_salt)
        if self.best_of not in (None, 1, self.n):
            raise Unsupported("best_of is not supported; use n and choose among the choices", "best_of")
        if (self.n or 1) > limits.n:
            raise InvalidRequest(f"n must be at most {limits.n}, not {self.n}", "n")
        if len(self.logit_bias or ()) > limits.logit_bias:
            raise InvalidRequest(f"logit_bias may hold at most {limits.logit_bias} tokens", "logit_bias")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        check_words("stop", stops, limits.stop_strings, limits)
        check_words("bad_words", self.bad_words or [], limits.bad_words, limits)

    def sampling_params(self, defaults: dict[str, float], **overrides: int | None) -> SamplingParams:
        """Build the text-level parameters: from `overrides`, else the body's fields, else the model's defaults, else
        OpenAI's. Raises InvalidRequest."""
        fields = SamplingParams.__struct_fields__
        values = {name: value for name in fields if (value := getattr(self, name, None)) is not None}
        values["structured_outputs"] = self.to_structured_outputs()
        if self.repetition_detection is not None:
            values["repetition_detection"] = self.repetition_detection.to_params()
        return SamplingParams(**{**defaults, **values, **overrides})

    def to_structured_outputs(self) -> StructuredOutputs | None:
        """Build the constraint on the text. Raises InvalidRequest, Unsupported."""
        wanted = None if self.structured_outputs is None else self.structured_outputs.to_params()
        format = None if self.response_format is None else self.response_format.to_params()
        if wanted is not None and format is not None:
            raise InvalidRequest(f"response_format and {wanted.param} exclude each other", wanted.param)
        return wanted or format


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(
        default=None, description="For models whose reasoning is separated from the answer."
    )


class ResponseMetrics(BaseModel):
    """Times of a request with all its choices; null where there is nothing to measure."""

    queue_time_ms: float | None = Field(description="From the engine's receipt to the first scheduling.")
    time_to_first_token_ms: float | None = Field(description="From the first scheduling to the first token.")
    generation_time_ms: float | None = Field(description="From the first token to the last.")
    mean_itl_ms: float | None = Field(description="Mean time from one token of a choice to its next.")
    tokens_per_second: float | None = Field(
        description="Generated tokens by the time from first scheduling to the last."
    )


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry per prompt token, keyed by token id; the first is null."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


class ObjectList(BaseModel):
    """A page of stored objects."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def parse_body(kind: type[Body], content: bytes, limits: Limits) -> Body:
    """Parse and check a request body. Raises InvalidRequest, which names the first invalid field, and TooLarge."""
    values = read_fields(content, limits)
    unknown = _find_unknown_fields(kind, values)
    if unknown:
        raise _build_unknown_field_error(kind, unknown[0])
    return validate_body(kind, {name: value for name, value in values.items() if name in kind.model_fields})


def _find_unknown_fields(kind: type[Body], values: dict[str, Any]) -> list[str]:
    """Return the names of fields with a value; a null field counts as absent."""
    return [name for name, value in values.items() if name not in kind.model_fields and value is not None]


def _build_unknown_field_error(kind: type[Body], name: str) -> InvalidRequest:
    if issubclass(kind, RequestBody) and (reason := kind.explain_unknown(name)):
        return Unsupported(f"{name} is not supported; {reason}", name)
    if name == "extra_body":
        return InvalidRequest("extra_body is an argument of OpenAI's client; send its fields beside the others", name)
    close = difflib.get_close_matches(name, kind.model_fields, n=1, cutoff=0.7)
    suggestion = f"; did you mean {close[0]}?" if close else ""
    return InvalidRequest(f"unknown field {name}{suggestion}", name)


def parse_lenient_body(kind: type[Body], content: bytes, limits: Limits) -> tuple[Body, list[str]]:
    """Like `parse_body`, but drops unknown fields and returns their names, as `name` or `tools[0].name`."""
    values = read_fields(content, limits)
    known = {name: value for name, value in values.items() if name in kind.model_fields}
    body = validate_body(kind, known)
    return body, _find_unknown_fields(kind, values) + find_nested_unknown(body, known)


def parse_by_policy(
    kind: type[Body], content: bytes, limits: Limits, *, ignores_unknown: bool
) -> tuple[Body, list[str]]:
    """Parse the body of a route where --unknown-fields decides. Returns it, and the names of the dropped fields. Raises
    InvalidRequest, TooLarge."""
    if ignores_unknown:
        return parse_lenient_body(kind, content, limits)
    return parse_body(kind, content, limits), []


def validate_body(kind: type[Body], values: dict[str, Any]) -> Body:
    """Raises InvalidRequest, which names the first invalid field."""
    has_changed = True
    while has_changed:  # at most once per field
        try:
            return kind.model_validate(values)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False)
        has_changed = convert_whole_floats(values, problems)
    param = _path(problems[0]["loc"])
    problem = problems[0]["type"]
    if problem == "missing":
        raise InvalidRequest(f"{param} is required", param)
    if problem == "extra_forbidden":
        raise InvalidRequest(f"unknown field {param}", param)
    # A field that allows several types has one problem per type.
    reasons = dict.fromkeys(_reword(entry["msg"]) for entry in problems if _path(entry["loc"]) == param)
    raise InvalidRequest(f"{param}: {'; or: '.join(reasons)}", param)


def _reword(message: str) -> str:
    """Drop what only this program's source would explain."""
    return re.sub(r"^Value error, | or instance of \w+", "", message)


def _path(location: tuple[int | str, ...]) -> str:
    """Return `messages[0].content` for ("messages", 0, "content", "str"): pydantic appends the type that it tried."""
    path = str(location[0])
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            path += f".{part}"
        else:
            break
    return path


def check_words(name: str, words: list[str], most: int, limits: Limits) -> None:
    """Raise InvalidRequest, under the name of the field, if there are too many words or one is too long."""
    if len(words) > most:
        raise InvalidRequest(f"{name} may hold at most {most} strings, not {len(words)}", name)
    if words and (longest := max(map(len, words))) > limits.stop_characters:
        raise InvalidRequest(
            f"each string of {name} may be {limits.stop_characters} characters long, not {longest}", name
        )
