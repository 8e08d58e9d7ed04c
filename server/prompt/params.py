"""`SamplingParams`: how text is to be generated, in words of text, under the names that vLLM users know.

Checks ranges, once, for HTTP requests and for the offline `LLM` alike; how much of each a request may hold is
`engine.limits`' and checked by the schema. Knows no model: what depends on the vocabulary
or on the context length is `validate`'s.
"""

from __future__ import annotations

import msgspec

from serve_llm.server.errors import InvalidRequest


class Range(msgspec.Struct, frozen=True):
    """Allowed values of a number, both ends included unless `above` (then the lower end is not)."""

    low: float
    high: float | None = None
    above: bool = False

    def __contains__(self, value: float) -> bool:
        low = value > self.low if self.above else value >= self.low
        return low and (self.high is None or value <= self.high)  # false for NaN

    def __str__(self) -> str:
        low = f"greater than {self.low}" if self.above else f"at least {self.low}"
        return low if self.high is None else f"{low} and at most {self.high}"


LARGEST = 2**31 - 1  # of a number whose real limit is the model's
RANGES = {
    "n": Range(1),
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
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
}
LOGIT_BIAS = Range(-100, 100)


class SamplingParams(msgspec.Struct, kw_only=True):
    """Each field as in OpenAI's and vLLM's APIs. Raises InvalidRequest (a ValueError) that names the first bad one."""

    n: int = 1
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
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
    max_tokens: int | None = 16  # None: what is left of the context
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None  # keep the prompt's last tokens; -1: as many as fit

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise InvalidRequest(f"{name} must be {allowed}, not {value}", name)
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequest("truncate_prompt_tokens must be -1 or at least 1, not 0", "truncate_prompt_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        for name, words in (("stop", self.stop_strings), ("bad_words", self.bad_words or [])):
            if "" in words:
                raise InvalidRequest(f"{name} must not hold an empty string", name)
        for token_id, bias in (self.logit_bias or {}).items():
            if bias not in LOGIT_BIAS:
                raise InvalidRequest(f"logit_bias of token {token_id} must be {LOGIT_BIAS}, not {bias}", "logit_bias")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids must not be empty", "allowed_token_ids")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []
