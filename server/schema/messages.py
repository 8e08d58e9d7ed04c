"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's Messages API: requests, replies and stream events.

Unknown fields have no effect; the response names them in a header. `prompt.blocks` reads the content blocks.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from serve_llm.common.options.limits import Limits
from serve_llm.server.dialects.tool import Tool, ToolChoice
from serve_llm.server.http.errors import InvalidRequest, ThreadUnsupported, Unsupported
from serve_llm.server.prompt.blocks import continues_reply, translate_messages
from serve_llm.server.prompt.chat_turn import ChatTurn, append_user_text
from serve_llm.server.sampling_params import SamplingParams
from serve_llm.server.schema.common import Ignored, Strings, TranslatedBody, check_words, ranged
from serve_llm.server.schema.known_tools import KNOWN_TOOLS
from serve_llm.server.schema.output_format import read_output_format
from serve_llm.server.schema.responses import SUMMARY_REQUEST
from serve_llm.server.schema.tools import build_tool, check_num_tools

# Tools that Anthropic's servers run, or that need a model that sees screens; and versions that are not in KNOWN_TOOLS.
_SERVER_TOOLS = re.compile(
    r"(web_search|web_fetch|code_execution|bash|text_editor|computer|computer_toolset|browser_toolset|memory|advisor|"
    r"mcp_toolset|tool_search_tool\w*?)"
    r"(_\d{8})?"
)


Block = dict[str, object]
Blocks = Annotated[list[Block], Field(fail_fast=True)]


class MessageParam(TranslatedBody):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks = Field(description="Blocks of type text, tool_use, tool_result, thinking.")


class ClientTool(TranslatedBody):
    type: str | None = Field(
        default=None, description="custom, or a tool of Anthropic's; those that its servers run are skipped."
    )
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, object] | None = None
    strict: bool | None = None
    cache_control: Ignored = None


def _complete(tool: ClientTool) -> ClientTool:
    """Return a tool of Anthropic's that the client runs as a custom one; others as they are."""
    known = KNOWN_TOOLS.get(tool.type or "")
    if known is None:
        return tool
    name = known.name if tool.name is None else tool.name
    description = known.description if tool.description is None else tool.description
    schema = known.schema if tool.input_schema is None else tool.input_schema
    return tool.model_copy(update={"type": "custom", "name": name, "description": description, "input_schema": schema})


class ClientToolChoice(TranslatedBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="With type tool: the one to call.")
    disable_parallel_tool_use: bool | None = None


class Thinking(TranslatedBody):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="between_tools: as disabled. What the model writes between tool calls is text."
    )
    budget_tokens: int | None = Field(default=None, description="At least 1, and less than max_tokens.")
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="omitted: thinking blocks are empty except for their signature."
    )

    @property
    def is_on(self) -> bool:
        return self.type in ("enabled", "adaptive")


class OutputFormat(TranslatedBody):
    type: Literal["json_schema"]
    json_schema: dict[str, object] = Field(alias="schema")


class OutputConfig(TranslatedBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Compaction(TranslatedBody):
    type: Literal["summarize"]
    instructions: str | None = Field(
        default=None, description="What to ask the model for instead of the server's text."
    )


class CountTokensRequest(TranslatedBody):
    model: str | None = Field(default=None, description="A served model's name; the served model when absent.")
    messages: Annotated[list[MessageParam], Field(fail_fast=True)]
    system: str | Blocks | None = None
    tools: Annotated[list[ClientTool], Field(fail_fast=True)] | None = None
    tool_choice: ClientToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(default=None, description="Earlier name of output_config.format.")
    thread: object | None = Field(default=None, description="Refused: the server keeps no conversations.")

    def to_turn(self, params: SamplingParams, limits: Limits) -> tuple[ChatTurn, list[str]]:
        """Build the turn. Also returns the places of tools and blocks that are skipped. Raises InvalidRequest,
        Unsupported."""
        if self.thread is not None:
            raise ThreadUnsupported("threads are not supported: send the whole conversation, without thread", "thread")
        if len(self.messages) > limits.messages:
            raise InvalidRequest(f"{len(self.messages)} messages are more than {limits.messages}", "messages")
        tools, skipped_tools = self._read_tools(limits)
        tool_choice = self._read_tool_choice(tools, skipped_tools)
        is_continued = continues_reply(self.messages)
        messages, skipped_blocks = translate_messages(self.system, self.messages)
        if self.summary_request is not None:
            messages = append_user_text(messages, self.summary_request)
            tool_choice = ToolChoice("none")
            is_continued = False
        turn = ChatTurn(
            messages=messages,
            params=params,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use,
            include_reasoning=self._thinks,
            reasoning_effort=self._effort,
            chat_template_kwargs=self._template_kwargs,
            add_generation_prompt=not is_continued,
            continue_final_message=is_continued,
        )
        return turn, skipped_tools + skipped_blocks

    @property
    def summary_request(self) -> str | None:
        """What the model is asked after the conversation, if it is to be summarised."""
        return None

    @property
    def _thinks(self) -> bool:
        """Whether thinking is requested. As in Anthropic's API, it is not by default."""
        return self.thinking is not None and self.thinking.is_on

    @property
    def _effort(self) -> str | None:
        if self.thinking is not None and not self.thinking.is_on:
            return "none"
        return None if self.output_config is None else self.output_config.effort

    @property
    def _template_kwargs(self) -> dict[str, object]:
        if self.thinking is not None and self.thinking.type == "adaptive":
            return {}
        return {"enable_thinking": self._thinks, "thinking": self._thinks}

    def _read_tools(self, limits: Limits) -> tuple[list[Tool], list[str]]:
        definitions = self.tools or []
        check_num_tools(definitions, limits)
        tools: dict[str, Tool] = {}
        skipped = []
        for index, definition in enumerate(map(_complete, definitions)):
            param = f"tools[{index}]"
            if definition.type not in (None, "custom"):
                if not _SERVER_TOOLS.fullmatch(definition.type):
                    raise Unsupported(f"{param}: tools of type {definition.type!r} are not supported", f"{param}.type")
                skipped.append(param)
                continue
            if definition.name is None or definition.input_schema is None:
                name = "name" if definition.name is None else "input_schema"
                raise InvalidRequest(f"{param}.{name} is required", f"{param}.{name}")
            if definition.name in tools:
                raise InvalidRequest(f"{param}.name: {definition.name} appears twice", f"{param}.name")
            tools[definition.name] = build_tool(
                definition.name,
                definition.description,
                definition.input_schema,
                definition.strict,
                param,
                "input_schema",
            )
        return list(tools.values()), skipped

    def _read_tool_choice(self, tools: list[Tool], skipped: list[str]) -> ToolChoice:
        """Read the tool choice. One that names skipped tools becomes auto, or none without others, and is added to
        `skipped`."""
        choice = self.tool_choice
        any_tool = ToolChoice("auto" if tools else "none")
        if choice is None or choice.type == "auto":
            return any_tool
        if choice.type == "none":
            return ToolChoice("none")
        if choice.type == "tool":
            if choice.name is None:
                raise InvalidRequest("tool_choice.name is required with type tool", "tool_choice.name")
            if all(choice.name != tool.name for tool in tools):
                if any(choice.name == definition.name for definition in self.tools or []):
                    skipped.append("tool_choice")
                    return any_tool
                raise InvalidRequest(
                    f"tool_choice.name: {choice.name[:200]} is not one of the tools", "tool_choice.name"
                )
            return ToolChoice("required", (choice.name,), is_named=True)
        if not self.tools:
            raise InvalidRequest("tool_choice needs tools", "tool_choice")
        if not tools:
            skipped.append("tool_choice")
            return any_tool
        return ToolChoice("required")


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(
        ge=0, description="An upper bound: less if the context is too short for it. 0 only computes the prompt."
    )
    stream: bool | None = None
    stop_sequences: Strings | None = None
    temperature: float | None = ranged("temperature", "0 takes the most likely token.")
    top_k: int | None = ranged("top_k")
    top_p: float | None = ranged("top_p")
    compaction: Compaction | None = Field(default=None, description="The reply is a summary of the conversation.")
    metadata: Ignored = None
    service_tier: Ignored = None

    def check(self, limits: Limits) -> None:
        """Raises InvalidRequest."""
        has_format = self.output_format is not None or (self.output_config is not None and self.output_config.format)
        if self.compaction is not None and has_format:
            raise InvalidRequest("compaction and a format of the output exclude each other", "compaction")
        sequences = self.stop_sequences or []
        check_words("stop_sequences", sequences, limits.stop_strings, limits)
        if "" in sequences:
            raise InvalidRequest("stop_sequences must not hold an empty string", "stop_sequences")

    @property
    def summary_request(self) -> str | None:
        if self.compaction is None:
            return None
        return (self.compaction.instructions or "").strip() or SUMMARY_REQUEST

    @property
    def omits_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def build_params(self, defaults: dict[str, float]) -> SamplingParams:
        """Build the parameters. defaults: the model's. Raises InvalidRequest."""
        in_config = None if self.output_config is None else self.output_config.format
        given = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        values = {**defaults, **{name: value for name, value in given.items() if value is not None}}
        return SamplingParams(
            max_tokens=None,
            stop=self.stop_sequences,
            structured_outputs=read_output_format(in_config, self.output_format),
            thinking_token_budget=self._read_budget(),
            **values,  # type: ignore[arg-type]
        )

    def _read_budget(self) -> int | None:
        if not self._thinks:
            return 0
        if self.thinking is None or self.thinking.type != "enabled":
            return None
        budget = self.thinking.budget_tokens
        param = "thinking.budget_tokens"
        if budget is None:
            raise InvalidRequest(f"{param} is required with type enabled", param)
        if not 1 <= budget < self.max_tokens:
            raise InvalidRequest(f"{param} must be at least 1 and less than max_tokens, not {budget}", param)
        return budget


class MessageOutputDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    """All prompt tokens are input_tokens + cache_read_input_tokens."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens_details: MessageOutputDetails


class ReplyBlock(BaseModel):
    type: Literal["text", "thinking", "tool_use", "compaction"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, object] | None = None
    content: str | None = None  # the summary of a compaction; null if its end was cut off


class MessageReply(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ReplyBlock]
    stop_reason: (
        Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use", "compaction"]
        | None
    )
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """One event of a stream; its other fields depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
        "error",
    ]


class CountTokensReply(BaseModel):
    input_tokens: int


class MessageErrorDetails(BaseModel):
    error_code: str


class MessageError(BaseModel):
    type: str
    message: str
    details: MessageErrorDetails | None = Field(default=None, description="Absent from most errors.")


class MessageErrorBody(BaseModel):
    type: Literal["error"]
    error: MessageError
    request_id: str
