"""POST /v1/completions: request, reply and stream events."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.schema.common import Ids, PromptLogprobs, ResponseMetrics, SamplingBody, Strings, Usage, ranged
from serve_llm.server.schema.peer_fields import PeerFields


def _prompt_tag(prompt: object) -> str | None:
    """Return the type of a prompt, by its first element: trying all types on a long prompt takes seconds."""
    if isinstance(prompt, str):
        return "str"
    if not isinstance(prompt, list):
        return None
    first = prompt[0] if prompt else 0
    if isinstance(first, str):
        return "list[str]"
    if isinstance(first, list):
        return "list[list[int]]"
    return "list[int]" if isinstance(first, int | float) else None


Prompt = Annotated[
    Annotated[str, Tag("str")]
    | Annotated[Strings, Tag("list[str]")]
    | Annotated[Ids, Tag("list[int]")]
    | Annotated[list[Ids], Field(fail_fast=True), Tag("list[list[int]]")],
    Discriminator(
        _prompt_tag,
        custom_error_type="prompt",
        custom_error_message="it must be a text, a list of texts, a list of token ids, or a list of such lists",
    ),
]

# Fields of conversations -> why this route has none.
_ELSEWHERE = {
    "messages": "this route takes prompt, /v1/chat/completions takes messages",
    "thinking_token_budget": "reasoning is read in conversations only; /v1/chat/completions limits it",
}


class CompletionRequest(SamplingBody, PeerFields):
    prompt: Prompt = Field(description="A text, a list of texts, a list of token ids, or a list of such lists.")
    echo: bool | None = Field(default=None, description="Put the prompt before each text (and its logprobs).")
    logprobs: int | None = ranged(
        "logprobs", "Log-probabilities of the chosen token and of this many most likely tokens."
    )
    suffix: str | None = Field(
        default=None, description="Text after the one to be written, for models trained to fill in the middle."
    )

    @classmethod
    def explain_unknown(cls, name: str) -> str | None:
        return _ELSEWHERE.get(name)

    def check(self, limits: Limits) -> None:
        self.check_peer_fields()
        super().check(limits)
        for name in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                raise InvalidRequest(f"suffix and {name} exclude each other", "suffix")
        if isinstance(self.prompt, list) and not self.prompt:
            raise InvalidRequest("prompt must not be empty", "prompt")
        if len(self.prompts()) > limits.prompts:
            raise InvalidRequest(f"{len(self.prompts())} prompts are more than {limits.prompts}", "prompt")

    def prompts(self) -> list[str | list[int]]:
        """The prompts in order, each a text or token ids."""
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
    finish_reason: Literal["stop", "length", "repetition", "abort"] | None
    stop_reason: int | str | None = Field(default=None, description="The stop id or string that ended the text.")
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """The reply, and with `stream` each event, whose choices contain only the new text."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = Field(default=None, description="In a stream, in the last event.")
