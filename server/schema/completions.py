"""POST /v1/completions: the shapes of request, reply and events."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from serve_llm.engine.limits import Limits
from serve_llm.server.errors import InvalidRequest, Unsupported
from serve_llm.server.schema.common import Ids, PromptLogprobs, SamplingBody, Strings, Usage, ranged


def _form(prompt: object) -> str:
    """Which form a prompt has, by its beginning: trying them all on a long one takes seconds."""
    if not isinstance(prompt, list):
        return "str"
    first = prompt[0] if prompt else None
    return "list[str]" if isinstance(first, str) else "list[list[int]]" if isinstance(first, list) else "list[int]"


Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[Strings, Tag("list[str]")]
    | Annotated[Ids, Tag("list[int]")]
    | Annotated[list[Ids], Field(fail_fast=True), Tag("list[list[int]]")],
    Discriminator(_form),
]


class CompletionRequest(SamplingBody):
    prompt: Prompt = Field(description="A text, several, the ids of one, or the ids of several.")
    echo: bool | None = Field(default=None, description="The prompt in front of each text (and of its logprobs).")
    logprobs: int | None = ranged("logprobs", "The chosen and the so many likeliest tokens' log-probabilities.")
    best_of: object | None = Field(default=None, description="Refused: use n.")
    suffix: object | None = Field(default=None, description="Refused.")

    def check(self, limits: Limits) -> None:
        super().check(limits)
        if self.best_of is not None:
            raise Unsupported("best_of is not supported; use n and choose among the choices", "best_of")
        if self.suffix is not None:
            raise Unsupported("suffix is not supported", "suffix")
        if isinstance(self.prompt, list) and not self.prompt:
            raise InvalidRequest("prompt must not be empty", "prompt")
        if len(self.prompts()) > limits.prompts:
            raise InvalidRequest(f"{len(self.prompts())} prompts are more than {limits.prompts}", "prompt")

    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself, in order."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class CompletionLogprobs(BaseModel):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None = Field(default=None, description="The stop id or string that ended the text.")
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """The reply, and with `stream` each event (where the choices hold what is new)."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
