"""POST /v1/responses and /v1/responses/input_tokens, the Responses API: requests, replies and stream events.

Unknown fields have no effect; the response names them in a header. `prompt.items` reads the input items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_llm.common.options.limits import Limits
from serve_llm.server.dialects.tool import ToolChoice
from serve_llm.server.http.errors import InvalidRequest, ResponseNotFound, Unsupported
from serve_llm.server.prompt.chat_turn import ChatTurn, append_user_text
from serve_llm.server.prompt.items import ToolItem, continues_reply, read_kind, translate_items
from serve_llm.server.sampling_params import RANGES, SamplingParams
from serve_llm.server.schema.common import (
    Biases,
    Ignored,
    RequestId,
    Strings,
    TranslatedBody,
    check_cache_salt,
    check_metadata,
    check_words,
    ranged,
)
from serve_llm.server.schema.response_tools import (
    FlatTool,
    FlatToolChoice,
    describe_tools,
    read_tool_choice,
    read_tools,
)
from serve_llm.server.schema.structured_output import StructuredOutputsField
from serve_llm.server.structured_output.params import StructuredOutputs

INCLUDED_LOGPROBS = "message.output_text.logprobs"
INCLUDED_REASONING = "reasoning.encrypted_content"
SUMMARY_REQUEST = (
    "Summarise this conversation. The summary will replace it, so that the work can go on without the rest. Say what "
    "was asked for, what has been done and found out, which decisions, constraints and wishes hold, and what is still "
    "to do. Keep names, paths, numbers and other facts that are needed. Write the summary only."
)
MAX_SUMMARY_TOKENS = 8192  # including reasoning
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "thinking_token_budget",
)
Json = dict[str, object]
Items = Annotated[list[Json], Field(fail_fast=True)]


class TextFormat(TranslatedBody):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(default=None, description="Returned; a schema is enforced in any case.")
    json_schema: dict[str, object] | None = Field(default=None, alias="schema")

    def describe(self) -> Json:
        """Describe the format as the reply repeats it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {**self.model_dump(by_alias=True), "strict": bool(self.strict)}


class TextConfig(TranslatedBody):
    format: TextFormat | None = None
    verbosity: str | None = Field(default=None, description="Returned; has no effect.")


class ReasoningConfig(TranslatedBody):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = Field(default=None, description="Returned; reasoning is not summed up.")


class InputTokensRequest(TranslatedBody):
    model: str | None = Field(default=None, description="A served model's name; the served model when absent.")
    input: str | Items | None = Field(
        default=None,
        description="A text, or items: messages, calls and their outputs, reasoning, compactions. May be absent with "
        "previous_response_id.",
    )
    instructions: str | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    previous_response_id: str | None = Field(
        default=None, description="A stored response that this one continues; needs --responses-store."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="auto keeps the last tokens of a prompt that is too long."
    )
    chat_template_kwargs: dict[str, object] | None = Field(
        default=None, description="More variables for the chat template."
    )

    def to_turn(
        self, params: SamplingParams, limits: Limits, history: Sequence[Json] | None = None
    ) -> tuple[ChatTurn, list[str]]:
        """Build the turn. Also returns the places of what is skipped. Raises InvalidRequest, Unsupported,
        ResponseNotFound.

        history: the items of the conversation that ends with the previous response; None if they are unknown.
        """
        if self.previous_response_id is not None and history is None:
            raise ResponseNotFound(
                "this server stores no responses; send the conversation as input", "previous_response_id"
            )
        if self.input is None and self.previous_response_id is None:
            raise InvalidRequest("input is required", "input")
        if isinstance(self.input, list) and len(self.input) > limits.messages:
            raise InvalidRequest(f"{len(self.input)} items are more than {limits.messages}", "input")
        tools, skipped_tools = read_tools(self.tools or [], limits)
        items = self.input or ()
        messages, skipped_items = translate_items(
            self.instructions, items[:-1] if self.ends_with_trigger else items, history or ()
        )
        if not messages:
            raise InvalidRequest("input must not be empty", "input")
        tool_choice = read_tool_choice(self.tool_choice, tools, self.tools or [], skipped_tools)
        if self.is_compaction:
            messages = append_user_text(messages, SUMMARY_REQUEST)
            tool_choice = ToolChoice("none")
        continues = not self.is_compaction and continues_reply(items, history or (), messages)
        turn = ChatTurn(
            messages=messages,
            params=params,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            param="input",
            max_tokens_param="max_output_tokens",
            default_max_tokens=MAX_SUMMARY_TOKENS if self.is_compaction else None,
        )
        return turn, skipped_tools + skipped_items

    @property
    def ends_with_trigger(self) -> bool:
        """Whether the last item requests a summary of the conversation."""
        return isinstance(self.input, list) and bool(self.input) and read_kind(self.input[-1]) == "compaction_trigger"

    @property
    def is_compaction(self) -> bool:
        """Whether the reply is a summary of the conversation."""
        return self.ends_with_trigger

    @property
    def tool_items(self) -> dict[str, ToolItem]:
        """Describe the tools by the name that the model calls."""
        return describe_tools(self.tools or [])


class CompactRequest(InputTokensRequest):
    """A conversation to be replaced by a summary."""

    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    service_tier: Ignored = None

    @property
    def is_compaction(self) -> bool:
        return True

    def build_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """defaults: those of the model."""
        truncate = -1 if self.truncation == "auto" else None
        return SamplingParams(max_tokens=None, truncate_prompt_tokens=truncate, **defaults)


class ResponsesRequest(InputTokensRequest):
    max_output_tokens: int | None = Field(default=None, ge=1, description="The rest of the context when absent.")
    stream: bool | None = None
    temperature: float | None = ranged("temperature", "0 takes the most likely token.")
    top_p: float | None = ranged("top_p")
    presence_penalty: float | None = ranged("presence_penalty")
    frequency_penalty: float | None = ranged("frequency_penalty")
    include: Strings | None = Field(
        default=None,
        description=f"{INCLUDED_REASONING}, {INCLUDED_LOGPROBS}; others have no effect; X-Ignored-Fields names them.",
    )
    metadata: dict[str, str] | None = Field(default=None, description="Up to 16 texts, returned as they are.")
    background: bool | None = Field(
        default=None, description="Answer at once and continue without the client. Needs a store."
    )
    top_logprobs: int | None = ranged("logprobs", f"Above 0, requires {INCLUDED_LOGPROBS!r} in include.")
    max_tool_calls: int | None = Field(default=None, description="Returned as it is: it limits hosted tools.")
    store: bool | None = Field(default=None, description="Default true with --responses-store, false without it.")
    conversation: object | None = Field(default=None, description="Refused: this server keeps no conversations.")
    prompt: object | None = Field(default=None, description="Refused: this server keeps no prompts.")
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Ignored = None
    user: str | None = Field(default=None, description="Returned as it is.")
    stream_options: Ignored = None
    # vLLM's
    top_k: int | None = ranged("top_k", "0 and -1: off.")
    min_p: float | None = ranged("min_p")
    repetition_penalty: float | None = ranged("repetition_penalty")
    logit_bias: Biases | None = Field(default=None, description="Token id to bias, added to its logit.")
    seed: int | None = ranged("seed", "The same request and seed give the same tokens.")
    stop: str | Strings | None = Field(default=None, description="Strings that end the text.")
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputsField = Field(default=None, description="Instead of text.format.")
    include_reasoning: bool | None = Field(default=None, description="False omits the reasoning from the answer.")
    thinking_token_budget: int | None = ranged("thinking_token_budget", "Tokens of reasoning; -1: no limit.")
    priority: int | None = Field(default=None, description="Smaller values run first; between -2**31 and 2**31 - 1.")
    cache_salt: str | None = Field(default=None, description="Prefixes are shared between equal salts only.")
    request_id: RequestId | None = None

    def check(self, has_store: bool, limits: Limits) -> None:
        """Raises InvalidRequest, Unsupported."""
        check_metadata(self.metadata or {})
        check_cache_salt(self.cache_salt)
        if self.is_compaction and self.structured_outputs is not None:
            raise InvalidRequest("structured_outputs and a compaction_trigger exclude each other", "structured_outputs")
        if self.priority is not None and not -(2**31) <= self.priority < 2**31:
            raise InvalidRequest("priority must fit into 32 bits", "priority")
        if len(self.logit_bias or ()) > limits.logit_bias:
            raise InvalidRequest(f"logit_bias may hold at most {limits.logit_bias} tokens", "logit_bias")
        check_words("stop", [self.stop] if isinstance(self.stop, str) else self.stop or [], limits.stop_strings, limits)
        for name in ("conversation", "prompt"):
            if getattr(self, name) is not None:
                raise Unsupported(f"{name} is not supported: send its content as input", name)
        if self.background and not has_store:
            raise Unsupported("background: true is not supported: this server stores no responses", "background")
        if self.background and self.store is False:
            raise InvalidRequest("background: true needs store: true", "background")
        if self.top_logprobs and not self._includes_logprobs:
            raise InvalidRequest(f"top_logprobs needs include: [{INCLUDED_LOGPROBS!r}]", "top_logprobs")
        if self.top_logprobs is not None and self.top_logprobs not in RANGES["logprobs"]:
            raise InvalidRequest(f"top_logprobs must be {RANGES['logprobs']}, not {self.top_logprobs}", "top_logprobs")

    def find_ignored_includes(self) -> list[str]:
        """Find the entries of `include` that have no effect, such as "include[1]"."""
        known = (INCLUDED_LOGPROBS, INCLUDED_REASONING)
        return [f"include[{index}]" for index, name in enumerate(self.include or ()) if name not in known]

    @property
    def _includes_logprobs(self) -> bool:
        return INCLUDED_LOGPROBS in (self.include or ())

    def to_turn(
        self, params: SamplingParams, limits: Limits, history: Sequence[Json] | None = None
    ) -> tuple[ChatTurn, list[str]]:
        turn, skipped = super().to_turn(params, limits, history)
        includes_reasoning = self.include_reasoning is not False
        salt = self.cache_salt or ""
        priority = self.priority or 0
        return replace(turn, include_reasoning=includes_reasoning, priority=priority, cache_salt=salt), skipped

    def build_params(self, defaults: dict[str, float]) -> SamplingParams:
        """defaults: those of the model. Raises InvalidRequest."""
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        values = {**defaults, **given}
        return SamplingParams(
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self._includes_logprobs else None,
            structured_outputs=None if self.is_compaction else self._read_format(),
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            **values,
        )

    def describe(self, params: SamplingParams, is_stored: bool) -> dict[str, object]:
        """Describe what the reply repeats from the request."""
        text_format: dict[str, object] = {"type": "text"}
        if self.text is not None and self.text.format is not None:
            text_format = self.text.format.describe()
        choice = self.tool_choice or "auto"
        return {
            "previous_response_id": self.previous_response_id,
            "store": is_stored,
            "background": bool(self.background),
            "instructions": self.instructions,
            "tools": [_describe_tool(tool) for tool in self.tools or []],
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_unset=True),
            "truncation": self.truncation or "disabled",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": text_format, "verbosity": (self.text or TextConfig()).verbosity},
            "top_logprobs": self.top_logprobs or 0,
            "top_p": params.top_p,
            "temperature": params.temperature,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "reasoning": (self.reasoning or ReasoningConfig()).model_dump(),
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
            "user": self.user,
            **dict.fromkeys(("conversation", "moderation", "prompt", "prompt_cache_retention")),
        }

    def _read_format(self) -> StructuredOutputs | None:
        if self.text is None or self.text.format is None or self.text.format.type == "text":
            return None if self.structured_outputs is None else self.structured_outputs.to_params()
        if self.structured_outputs is not None:
            raise InvalidRequest("text.format and structured_outputs exclude each other", "structured_outputs")
        if self.text.format.type == "json_object":
            return StructuredOutputs(json_object=True, param="text.format")
        if self.text.format.json_schema is None:
            raise InvalidRequest("text.format.schema is required with type json_schema", "text.format.schema")
        return StructuredOutputs(json=self.text.format.json_schema, param="text.format.schema")


def _describe_tool(tool: FlatTool) -> Json:
    """Describe a tool as it was sent; a function has all its fields."""
    fields = tool.model_dump(exclude_unset=True)
    if tool.type == "function":
        return {"description": None, "parameters": None, "strict": None, **fields}
    return fields


class ResponseReply(BaseModel):
    """Has every field of the Responses API; those of the request are repeated."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[Json] = Field(description="Items: message, function_call, custom_tool_call, reasoning.")
    usage: Json | None
    error: Json | None
    incomplete_details: Json | None


class ResponseEvent(BaseModel):
    """One event of a stream; its other fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class CompactionReply(BaseModel):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Json] = Field(description="Messages of user, system and developer, then an item of type compaction.")
    usage: Json


class InputTokensReply(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int
