"""POST /v1/chat/completions: request, reply and stream events."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from serve_llm.common.options.limits import Limits
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt.chat_turn import ChatTurn
from serve_llm.server.prompt.messages import plain_messages
from serve_llm.server.sampling_params import RANGES, SamplingParams
from serve_llm.server.schema.chat_peer_fields import ChatPeerFields
from serve_llm.server.schema.common import (
    PromptLogprobs,
    RequestBody,
    ResponseMetrics,
    SamplingBody,
    Usage,
    ranged,
)
from serve_llm.server.schema.output_format import read_output_format
from serve_llm.server.schema.reasoning import ReasoningEffort, ReasoningOptions, ThinkingField, ThinkingOptions
from serve_llm.server.schema.tools import ToolChoiceField, Tools, read_tool_choice, read_tools
from serve_llm.server.structured_output.params import StructuredOutputs

# Any role that a template may know, such as ipython, but no delimiters: templates write roles between them.
Role = Annotated[str, Field(max_length=64, pattern=r"^\w[^\x00-\x1f\x7f-\x9f\u2028\u2029<>|\[\]\uff5c]*$")]
_MEDIA = ("image_url", "input_audio", "audio_url", "video_url")  # fields of parts that are refused by these names
_THINKS = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}


class TextContent(TypedDict):
    """Only parts that hold text are supported: text, input_text, output_text, refusal, thinking, reasoning."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    type: str
    text: NotRequired[str | None]
    refusal: NotRequired[str | None]
    thinking: NotRequired[str | None]


def _build_text_content(part: object) -> object:
    """Complete a part that is a text, or has no type: vLLM's clients may send its only field."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or "type" in part:
        return part
    kind = next((name for name in part if name == "text" or name in _MEDIA), None)
    if kind is None:
        raise ValueError('a part needs a type, such as {"type": "text", "text": "..."}')
    return {"type": kind, **part}


ContentPart = Annotated[TextContent, BeforeValidator(_build_text_content, json_schema_input_type=str | TextContent)]


class FunctionCall(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    name: str
    arguments: NotRequired[str | dict[str, object] | None]


class CustomCall(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    name: str
    input: str


class MessageToolCall(TypedDict):
    """Has `function` or `custom`, by its type."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    id: NotRequired[str | None]
    function: NotRequired[FunctionCall | None]
    custom: NotRequired[CustomCall | None]


class ChatMessage(TypedDict):
    """The chat template decides which roles there are. Other fields are passed to it unchanged."""

    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]

    role: Role
    content: NotRequired[str | Annotated[list[ContentPart], Field(fail_fast=True)] | None]
    name: NotRequired[str | None]
    tool_calls: NotRequired[Annotated[list[MessageToolCall], Field(fail_fast=True)] | None]
    tool_call_id: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]


_OTHER_ROUTES = {
    "prompt": "this route takes messages, /v1/completions takes prompt",
    "input": "this route takes messages, /v1/responses takes input",
}

Messages = Annotated[list[ChatMessage], Field(fail_fast=True)]


class TemplateBody(RequestBody):
    """Fields that control how messages become a prompt; shared with /tokenize."""

    add_generation_prompt: bool | None = Field(
        default=None, description="Open the assistant's turn; true unless continue_final_message."
    )
    continue_final_message: bool | None = Field(default=None, description="Continue the text of the last message.")
    chat_template: str | None = Field(
        default=None, description="Template to use instead of the model's own, if the server allows it."
    )
    chat_template_kwargs: dict[str, object] | None = Field(
        default=None, description="More variables for the chat template."
    )

    documents: list[dict[str, object]] | None = Field(
        default=None, description="For chat templates that show documents, such as those of Command R and Granite."
    )
    tools: Tools | None = Field(default=None, description="Functions and custom tools that the model may call.")
    reasoning_effort: ReasoningEffort | None = Field(
        default=None, description="For the chat template: how long to reason; none: not at all."
    )

    enable_thinking: bool | None = Field(
        default=None, description="For the chat template, as enable_thinking and thinking."
    )
    thinking: ThinkingField = Field(default=None, description="Another form of enable_thinking.")

    def _choose_thinking(self) -> dict[str, object]:
        """Variables of chat templates. Raises InvalidRequest."""
        wanted = self.enable_thinking
        if self.thinking is not None:
            thinks = _THINKS[self.thinking.type]
            if wanted is not None and thinks is not None and wanted != thinks:
                raise InvalidRequest("thinking and enable_thinking contradict each other", "thinking")
            wanted = thinks if wanted is None else wanted
        return {} if wanted is None else {"enable_thinking": wanted, "thinking": wanted}

    def build_turn(self, messages: list[ChatMessage], params: SamplingParams, limits: Limits, **more: Any) -> ChatTurn:
        """more: further fields of ChatTurn. Raises InvalidRequest, Unsupported."""
        if len(messages) > limits.messages:
            raise InvalidRequest(f"{len(messages)} messages are more than {limits.messages}", "messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        plain, skipped = plain_messages(messages)
        return ChatTurn(
            messages=plain,
            skipped=skipped,
            params=params,
            tools=read_tools(self.tools or [], limits),
            documents=self.documents or [],
            reasoning_effort=self.reasoning_effort,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            chat_template=self.chat_template,
            chat_template_kwargs={**self._choose_thinking(), **(self.chat_template_kwargs or {})},
            **more,
        )


class ChatRequest(SamplingBody, TemplateBody, ChatPeerFields):
    messages: Messages
    max_completion_tokens: int | None = ranged("max_tokens", "The rest of the context when absent.")
    logprobs: bool | None = None
    top_logprobs: int | None = ranged("logprobs", "Requires logprobs: true.")
    echo: bool | None = Field(
        default=None, description="Put the last message, if it is the assistant's, before the text."
    )
    tool_choice: ToolChoiceField | None = Field(default=None, description="auto when absent.")
    parallel_tool_calls: bool | None = Field(default=None, description="False: at most one call.")
    include_reasoning: bool | None = Field(default=None, description="False omits the reasoning from the answer.")
    thinking_token_budget: int | None = ranged("thinking_token_budget", "Tokens of reasoning; -1: no limit.")
    reasoning: ReasoningOptions | None = Field(default=None, description="OpenRouter's form of the fields above.")

    @classmethod
    def explain_unknown(cls, name: str) -> str | None:
        return _OTHER_ROUTES.get(name)

    def check(self, limits: Limits) -> None:
        self.check_peer_fields()
        if self.reasoning is not None:
            self._read_reasoning_options(self.reasoning)
        if self.thinking is not None:
            self._read_thinking_options(self.thinking)
        if self.output_config is not None and self.reasoning_effort is None:
            self.reasoning_effort = self.output_config.effort
        super().check(limits)
        if self.top_logprobs is not None:
            if not self.logprobs and self.top_logprobs != 0:
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

    def _read_reasoning_options(self, options: ReasoningOptions) -> None:
        """Raises InvalidRequest."""
        wanted: dict[str, object] = {
            "reasoning_effort": options.effort,
            "thinking_token_budget": options.max_tokens,
            "enable_thinking": options.enabled,
            "include_reasoning": None if options.exclude is None else not options.exclude,
        }
        self._take_options("reasoning", wanted)

    def _read_thinking_options(self, options: ThinkingOptions) -> None:
        """Raises InvalidRequest."""
        wanted: dict[str, object] = {
            "thinking_token_budget": options.budget_tokens,
            "include_reasoning": False if options.display == "omitted" else None,
        }
        self._take_options("thinking", wanted)

    def _take_options(self, field: str, wanted: dict[str, object]) -> None:
        """Give the fields that `field` stands for their values. Raises InvalidRequest if they have other values."""
        for name, value in wanted.items():
            if value is None:
                continue
            if getattr(self, name) not in (None, value):
                raise InvalidRequest(f"{field} and {name} contradict each other", field)
            setattr(self, name, value)

    @property
    def budget_hint(self) -> str | None:
        """The field of another API that holds the thinking budget, which models without reasoning ignore."""
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            return "thinking.budget_tokens"
        return "reasoning.max_tokens" if self.reasoning is not None and self.reasoning.max_tokens is not None else None

    @property
    def ineffective_fields(self) -> list[str]:
        """The fields that the response names as having no effect. Call it after `check`."""
        return self.list_ineffective(self.reasoning_effort, super().to_structured_outputs() is not None)

    def to_structured_outputs(self) -> StructuredOutputs | None:
        wanted = super().to_structured_outputs()
        if wanted is not None:
            return wanted
        return read_output_format(None if self.output_config is None else self.output_config.format, self.output_format)

    def chat_params(self, defaults: dict[str, float]) -> SamplingParams:
        """Build the parameters. defaults: the model's. Raises InvalidRequest, Unsupported."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling_params(defaults, max_tokens=max_tokens, logprobs=self.num_logprobs)

    def to_turn(self, params: SamplingParams, limits: Limits) -> ChatTurn:
        """Raises InvalidRequest, Unsupported."""
        return self.build_turn(
            self.messages,
            params,
            limits,
            tool_choice=read_tool_choice(self.tool_choice, self.tools or []),
            parallel_tool_calls=self.parallel_tool_calls is not False,
            include_reasoning=self.include_reasoning is not False,
            add_special_tokens=bool(self.add_special_tokens),
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            max_tokens_param="max_tokens" if self.max_completion_tokens is None else "max_completion_tokens",
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


class CalledFunction(BaseModel):
    name: str
    arguments: str = Field(description="JSON text.")


class CalledCustomTool(BaseModel):
    name: str
    input: str


class ChatToolCall(BaseModel):
    """Has `function` or `custom`, by its type."""

    id: str
    type: Literal["function", "custom"]
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None


class ChatReplyMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None = Field(description="Null if the model only called tools.")
    reasoning: str | None = Field(default=None, description="Or reasoning_content, by --reasoning-field.")
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None


class CalledFunctionDelta(BaseModel):
    name: str | None = None
    arguments: str


class CalledCustomToolDelta(BaseModel):
    name: str | None = None
    input: str


class ChatToolCallDelta(BaseModel):
    """The first of a call has id, type and name; the others only add to its arguments or input."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: CalledFunctionDelta | None = None
    custom: CalledCustomToolDelta | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCallDelta] | None = None


class ChatEnding(BaseModel):
    """Fields that the choices of replies and stream events share."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "repetition", "abort"] | None
    stop_reason: int | str | None = Field(default=None, description="The stop id or string that ended the text.")
    token_ids: list[int] | None = None


class ChatChoice(ChatEnding):
    message: ChatReplyMessage


class ChatEventChoice(ChatEnding):
    delta: ChatDelta


class ChatPrompt(BaseModel):
    """Fields about the prompt, in a reply and in the first event of each choice of a stream."""

    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatCompletion(ChatPrompt):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: ResponseMetrics | None = None


class ChatEvent(ChatPrompt):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatEventChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = Field(default=None, description="In the last event.")
