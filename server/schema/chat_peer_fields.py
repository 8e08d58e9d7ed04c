"""Fields that clients send in chat requests in addition to those of `PeerFields`: OpenAI's that are not supported, and
Anthropic's that gateways in front of this server pass on."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_llm.server.schema.common import Ignored
from serve_llm.server.schema.peer_fields import PeerFields, neutral
from serve_llm.server.schema.reasoning import ReasoningEffort


class OutputSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["json_schema"]
    json_schema: dict[str, object] = Field(alias="schema")


class OutputOptions(BaseModel):
    """Other fields have no effect; the response names them in a header."""

    model_config = ConfigDict(extra="allow", strict=True)

    effort: ReasoningEffort | None = Field(default=None, description="As reasoning_effort.")
    format: OutputSchema | None = Field(default=None, description="As response_format.")


class ChatPeerFields(PeerFields):
    reasoning_format: object | None = neutral("auto", "deepseek")
    separate_reasoning: object | None = neutral(True)
    stream_reasoning: object | None = neutral(True)
    # OpenAI's
    functions: object | None = neutral([], hint="use tools")
    function_call: object | None = neutral("none", hint="use tool_choice")
    modalities: object | None = neutral(["text"])
    audio: object | None = neutral()
    moderation: object | None = neutral()
    prediction: Ignored = None
    verbosity: Ignored = None
    web_search_options: Ignored = Field(default=None, description="No effect: this server does not search.")
    # Anthropic's
    context_management: Ignored = Field(default=None, description="No effect: the client's messages stay as they are.")
    output_config: OutputOptions | None = Field(
        default=None, description="Anthropic's form of reasoning_effort and response_format, which take precedence."
    )
    output_format: OutputSchema | None = Field(default=None, description="Earlier name of output_config.format.")

    def list_ineffective(self, effort: str | None, has_form: bool) -> list[str]:
        """List the fields that have a meaning elsewhere but no effect here.

        effort: the reasoning effort of the request. has_form: whether another field constrains the text.
        """
        names = [name for name in ("web_search_options", "context_management") if getattr(self, name) is not None]
        if self.output_format is not None and has_form:
            names.append("output_format")
        config = self.output_config
        if config is None:
            return names
        if config.effort not in (None, effort):
            names.append("output_config.effort")
        if config.format is not None and has_form:
            names.append("output_config.format")
        return names + [
            f"output_config.{name}" for name, value in (config.model_extra or {}).items() if value is not None
        ]
