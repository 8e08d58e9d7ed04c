"""Fields of chat requests about reasoning that are objects."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from serve_llm.server.schema.common import Ignored, RequestBody, ranged

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ReasoningOptions(RequestBody):
    effort: ReasoningEffort | None = Field(default=None, description="As reasoning_effort.")
    max_tokens: int | None = ranged("thinking_token_budget", "As thinking_token_budget.")
    enabled: bool | None = Field(default=None, description="As enable_thinking.")
    exclude: bool | None = Field(default=None, description="The opposite of include_reasoning.")
    summary: Ignored = None


class ThinkingOptions(RequestBody):
    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = ranged("thinking_token_budget", "As thinking_token_budget.")
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="omitted: as include_reasoning: false."
    )


def _build_thinking_options(value: object) -> object:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


ThinkingField = Annotated[
    ThinkingOptions | None,
    BeforeValidator(_build_thinking_options, json_schema_input_type=bool | ThinkingOptions | None),
]
