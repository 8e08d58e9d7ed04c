"""`SamplingParams`: the text-level parameters of a request, under the names that vLLM users know.

`SamplingParams` checks the ranges for HTTP requests and for the offline `LLM`. `server.schema` checks the sizes
(`Limits`), and `prompt.validate` checks what depends on the vocabulary and the context length.
"""

from __future__ import annotations

import copy
from typing import Literal

import msgspec

from serve_llm.server.field_types import convert_fields
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.sampling_fields import SamplingFields
from serve_llm.server.structured_output.params import StructuredOutputs


class Range(msgspec.Struct, frozen=True):
    """Allowed values of a number. Both ends are included, except for the lower end if `above`."""

    low: float
    high: float | None = None
    above: bool = False

    def __contains__(self, value: float) -> bool:
        low = value > self.low if self.above else value >= self.low
        return low and (self.high is None or value <= self.high)  # false for NaN

    def __str__(self) -> str:
        low = f"greater than {self.low}" if self.above else f"at least {self.low}"
        return low if self.high is None else f"{low} and at most {self.high}"


LARGEST = 2**31 - 1  # the model sets the real limit
RANGES = {
    "n": Range(1),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1),
    "top_k": Range(-1, LARGEST),
    "min_p": Range(0, 1),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0.01, 100),
    "seed": Range(-(2**63), 2**64 - 1),
    "max_tokens": Range(0, LARGEST),
    "min_tokens": Range(0, LARGEST),
    "logprobs": Range(0, 20),
    "prompt_logprobs": Range(0, 20),
    "truncate_prompt_tokens": Range(-1, LARGEST),
    "thinking_token_budget": Range(-1, LARGEST),
}
LOGIT_BIAS = Range(-100, 100)
PATTERN_SIZE = Range(1, 256)  # each size costs time for every token
REPETITIONS = Range(2, LARGEST)
MAX_LOGPROB_TOKEN_IDS = 128


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True):
    """Ends a text that repeats itself, once it ends with `min_count` copies of a pattern. Raises InvalidRequest."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int

    def __post_init__(self) -> None:
        convert_fields(self)
        for name, allowed in (
            ("max_pattern_size", PATTERN_SIZE),
            ("min_pattern_size", PATTERN_SIZE),
            ("min_count", REPETITIONS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                param = f"repetition_detection.{name}"
                raise InvalidRequest(f"{param} must be {allowed}, not {value}", param)
        if self.min_pattern_size > self.max_pattern_size:
            raise InvalidRequest(
                f"repetition_detection.min_pattern_size ({self.min_pattern_size}) must not exceed max_pattern_size "
                f"({self.max_pattern_size})",
                "repetition_detection.min_pattern_size",
            )


class SamplingParams(msgspec.Struct, kw_only=True, metaclass=SamplingFields):
    """Each field as in OpenAI's and vLLM's APIs. Raises InvalidRequest (a ValueError) that names the first bad one."""

    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 0: only the most likely token
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: a random one
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: the rest of the context
    min_tokens: int = 0
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None  # ids whose logprobs are requested too, with `logprobs`
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: int | None = None  # keep this many of the prompt's last tokens; -1: as many as fit
    truncation_side: Literal["left", "right"] = "left"  # on which truncate_prompt_tokens cuts
    repetition_detection: RepetitionDetection | None = None  # end a text that repeats itself
    thinking_token_budget: int | None = None  # tokens of reasoning, in chat; -1: no limit

    def __post_init__(self) -> None:
        convert_fields(self)
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise InvalidRequest(f"{name} must be {allowed}, not {value}", name)
        if self.truncation_side not in ("left", "right"):
            raise InvalidRequest(
                f"truncation_side must be left or right, not {self.truncation_side}", "truncation_side"
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1, not 0", "truncate_prompt_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        requested_ids = self.logprob_token_ids or []
        if len(requested_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(
                f"logprob_token_ids may hold at most {MAX_LOGPROB_TOKEN_IDS} ids, not {len(requested_ids)}",
                "logprob_token_ids",
            )
        if requested_ids and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs", "logprob_token_ids")
        for name, words in (("stop", self.stop_strings), ("bad_words", self.bad_words or [])):
            if "" in words:
                raise InvalidRequest(f"{name} must not hold an empty string", name)
        for token_id, bias in (self.logit_bias or {}).items():
            if bias not in LOGIT_BIAS:
                raise InvalidRequest(f"logit_bias of token {token_id} must be {LOGIT_BIAS}, not {bias}", "logit_bias")
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidRequest("ignore_eos and structured output exclude each other", "ignore_eos")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", "allowed_token_ids")

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing with this object, as vLLM's does."""
        return copy.deepcopy(self)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def max_logprobs(self) -> int | None:
        """The maximum number of logprobs at one position besides the chosen token's; None if none are requested."""
        return None if self.logprobs is None else self.logprobs + len(self.logprob_token_ids or ())
