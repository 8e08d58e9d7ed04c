"""POST /v1/chat/completions: the shapes of request, reply and events."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from serve_llm.engine.limits import Limits
from serve_llm.server.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.params import RANGES
from serve_llm.server.prompt.template import ChatTemplate
from serve_llm.server.schema.common import Ignored, PromptLogprobs, RequestBody, SamplingBody, Usage, ranged

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class ContentPart(TypedDict):
    """Only text parts are served; others are named in the error."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    type: str
    text: NotRequired[str | None]


class ChatMessage(TypedDict):
    """What else a message holds (tool_calls, reasoning, ...) reaches the chat template as it is."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    role: Role
    content: NotRequired[str | Annotated[list[ContentPart], Field(fail_fast=True)] | None]
    name: NotRequired[str | None]


Messages = Annotated[list[ChatMessage], Field(fail_fast=True)]


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: str


class TemplateBody(RequestBody):
    """How messages become a prompt; shared with /tokenize."""

    add_generation_prompt: bool | None = Field(
        default=None, description="Open the assistant's turn; true unless continue_final_message."
    )
    continue_final_message: bool | None = Field(default=None, description="Go on with the last message's own text.")
    chat_template: str | None = Field(
        default=None, description="Instead of the model's own, where the server allows it."
    )
    chat_template_kwargs: dict[str, object] | None = Field(
        default=None, description="More variables for the chat template."
    )

    def render(self, template: ChatTemplate | None, messages: list[ChatMessage], max_characters: int) -> str:
        """The prompt text. Raises InvalidRequest, Unsupported."""
        if template is None:
            raise InvalidRequest("this model has no chat template; start the server with --chat-template", "messages")
        if not messages:
            raise InvalidRequest("messages must not be empty", "messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        plain = [
            {name: value for name, value in message.items() if value is not None}
            | {"content": _text(message.get("content"), place)}
            for place, message in enumerate(messages)
        ]
        return template.render(
            plain,
            max_characters=max_characters,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            kwargs=self.chat_template_kwargs,
        )


def check_number(messages: list[ChatMessage], limits: Limits) -> None:
    """Raises InvalidRequest."""
    if len(messages) > limits.messages:
        raise InvalidRequest(f"{len(messages)} messages are more than {limits.messages}", "messages")


def _text(content: str | list[ContentPart] | None, place: int) -> str | None:
    """Several text parts stand on lines of their own."""
    if not isinstance(content, list):
        return content
    texts = []
    for number, part in enumerate(content):
        param = f"messages[{place}].content[{number}]"
        if part["type"] != "text":
            raise Unsupported(f"{param}: content of type {part['type']!r} is not supported, only text", param)
        text = part.get("text")
        if text is None:
            raise InvalidRequest(f"{param}.text is required", f"{param}.text")
        texts.append(text)
    return "\n".join(texts)


class ChatRequest(SamplingBody, TemplateBody):
    messages: Messages
    max_completion_tokens: int | None = ranged("max_tokens", "What is left of the context when absent.")
    logprobs: bool | None = None
    top_logprobs: int | None = ranged("logprobs", "Needs logprobs: true.")
    response_format: ResponseFormat | None = Field(default=None, description="Only type text.")
    tools: list[object] | None = Field(default=None, description="Refused, unless empty.")
    tool_choice: object | None = Field(default=None, description="Refused, unless none or auto.")
    functions: object | None = Field(default=None, description="Refused.")
    function_call: object | None = Field(default=None, description="Refused.")
    parallel_tool_calls: Ignored = None

    def check(self, limits: Limits) -> None:
        super().check(limits)
        check_number(self.messages, limits)
        if self.tools:
            raise Unsupported("tools are not supported", "tools")
        if self.tool_choice not in (None, "none", "auto"):
            raise Unsupported("tool_choice is not supported", "tool_choice")
        for name in ("functions", "function_call"):
            if getattr(self, name) is not None:
                raise Unsupported(f"{name} is not supported", name)
        if self.response_format is not None and self.response_format.type != "text":
            raise Unsupported(
                f"response_format {self.response_format.type!r} is not supported, only text", "response_format"
            )
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
            if self.top_logprobs not in RANGES["logprobs"]:
                raise InvalidRequest(
                    f"top_logprobs must be {RANGES['logprobs']}, not {self.top_logprobs}", "top_logprobs"
                )
        if self.max_completion_tokens is not None and self.max_completion_tokens not in RANGES["max_tokens"]:
            raise InvalidRequest(
                f"max_completion_tokens must be {RANGES['max_tokens']}, not {self.max_completion_tokens}",
                "max_completion_tokens",
            )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatTopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]


class ChatReplyMessage(BaseModel):
    role: Literal["assistant"]
    content: str


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatEnding(BaseModel):
    """What the choices of replies and events have in common."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: int | str | None = Field(default=None, description="The stop id or string that ended the text.")
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatChoice(ChatEnding):
    message: ChatReplyMessage


class ChatEventChoice(ChatEnding):
    delta: ChatDelta


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ChatEvent(BaseModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatEventChoice]
    usage: Usage | None = None
