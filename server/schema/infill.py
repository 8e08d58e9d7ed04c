"""POST /infill, llama.cpp's route for editors: request, reply and stream events."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.sampling_params import SamplingParams
from serve_llm.server.schema.common import Ignored, Strings, TranslatedBody, ranged

_MORE = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")


class InfillExtra(TranslatedBody):
    """A piece of another file."""

    text: str
    filename: str | None = None


class InfillRequest(TranslatedBody):
    model: str | None = Field(default=None, description="A served model's name; the served model when absent.")
    input_prefix: str | None = Field(default=None, description="The text before the cursor.")
    input_suffix: str | None = Field(default=None, description="The text after the cursor.")
    input_extra: Annotated[list[InfillExtra], Field(fail_fast=True)] | None = Field(
        default=None, description="Context from other files."
    )
    prompt: str | None = Field(default=None, description="The beginning of the text to be written.")
    n_predict: int | None = Field(
        default=None, ge=-1, le=2**31 - 1, description="The most tokens; absent or -1: as many as fit."
    )
    temperature: float | None = ranged("temperature")
    top_p: float | None = ranged("top_p")
    top_k: int | None = ranged("top_k")
    min_p: float | None = ranged("min_p")
    presence_penalty: float | None = ranged("presence_penalty")
    frequency_penalty: float | None = ranged("frequency_penalty")
    repeat_penalty: float | None = ranged("repetition_penalty")
    seed: int | None = ranged("seed", "-1: a random one.")
    stop: Strings | None = None
    stream: bool | None = None
    cache_prompt: Ignored = None
    n_indent: Ignored = None
    response_fields: Ignored = None
    samplers: Ignored = None
    t_max_prompt_ms: Ignored = None
    t_max_predict_ms: Ignored = None

    def build_params(self, defaults: dict[str, float], limits: Limits) -> SamplingParams:
        """Build the parameters. defaults: the model's. Raises InvalidRequest."""
        values = {name: value for name in _MORE if (value := getattr(self, name)) is not None}
        if self.repeat_penalty is not None:
            values["repetition_penalty"] = self.repeat_penalty
        if len(self.stop or ()) > limits.stop_strings:
            raise InvalidRequest(f"stop may hold at most {limits.stop_strings} strings", "stop")
        if any(len(text) > limits.stop_characters for text in self.stop or ()):
            raise InvalidRequest(f"each string of stop may be {limits.stop_characters} characters long", "stop")
        return SamplingParams(
            **{
                **defaults,
                **values,
                "max_tokens": None if self.n_predict == -1 else self.n_predict,
                "seed": None if self.seed == -1 else self.seed,
                "stop": self.stop,
            }
        )


class InfillTimings(BaseModel):
    prompt_n: int = Field(description="Tokens of the prompt that were computed.")
    prompt_ms: float | None
    predicted_n: int
    predicted_ms: float | None


class InfillReply(BaseModel):
    """The reply, and the last event of a stream."""

    index: Literal[0] = 0
    content: str = Field(description="Empty in the last event of a stream.")
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int = Field(description="Tokens of the prompt.")
    tokens_cached: int = Field(description="Tokens of the prompt that were found in the prefix cache.")
    truncated: Literal[False]
    stop_type: Literal["eos", "limit", "word", "none"]
    stopping_word: str
    timings: InfillTimings


class InfillEvent(BaseModel):
    index: Literal[0] = 0
    content: str
    stop: Literal[False]
