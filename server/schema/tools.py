"""The fields of chat requests that offer tools: `tools` and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve_llm.common.options.limits import Limits
from serve_llm.server.dialects.tool import Tool, ToolChoice
from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.custom_tools import describe_input
from serve_llm.server.prompt.items import ToolItem
from serve_llm.server.structured_output.errors import GrammarError, LarkError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(description="1 to 128 letters, digits, underscores, dots and dashes.")
    description: str | None = None
    parameters: dict[str, object] | None = Field(default=None, description="JSON schema of the arguments, an object.")
    strict: bool | None = Field(
        default=None,
        description="True: arguments always satisfy the schema, otherwise they do where the request forces a call.",
    )


class CustomGrammar(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    syntax: Literal["lark", "regex"]
    definition: str


class CustomInputFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = Field(default=None, description="With type grammar: what every text satisfies.")


class CustomDefinition(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(description="As a function's.")
    description: str | None = None
    format: CustomInputFormat | None = Field(default=None, description="Any text when absent.")


class ToolDefinition(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: str = Field(default="function", description="function, or custom for a tool that takes a text.")
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    @property
    def definition(self) -> FunctionDefinition | CustomDefinition | None:
        return self.custom if self.type == "custom" else self.function


class ToolName(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: str = Field(default="function", description="function or custom.")
    function: ToolName | None = Field(default=None, description="With type function: the one to call.")
    custom: ToolName | None = Field(default=None, description="With type custom: the one to call.")


class AllowedTools(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)]


class ToolChoiceFields(NamedTool):
    """A choice written as a mode is read as an object of that type."""

    type: str = Field(default="function", description="function, custom or allowed_tools.")
    allowed_tools: AllowedTools | None = Field(default=None, description="With type allowed_tools.")


def _read_mode(value: object) -> object:
    return {"type": value} if isinstance(value, str) else value


Tools = Annotated[list[ToolDefinition], Field(fail_fast=True)]
ToolChoiceField = Annotated[
    ToolChoiceFields,
    BeforeValidator(_read_mode, json_schema_input_type=Literal["none", "auto", "required"] | ToolChoiceFields),
]


def check_num_tools(definitions: Sequence[object], limits: Limits) -> None:
    """Raises InvalidRequest."""
    if len(definitions) > limits.tools:
        raise InvalidRequest(f"{len(definitions)} tools are more than {limits.tools}", "tools")


def read_tools(definitions: list[ToolDefinition], limits: Limits) -> list[Tool]:
    """Raises InvalidRequest, Unsupported."""
    check_num_tools(definitions, limits)
    tools: dict[str, Tool] = {}
    for index, definition in enumerate(definitions):
        param = f"tools[{index}]"
        if definition.type not in ("function", "custom"):
            raise Unsupported(
                f"{param}: tools of type {definition.type!r} are not supported, only function and custom", param
            )
        param = f"{param}.{definition.type}"
        match definition.definition:
            case None:
                raise InvalidRequest(f"{param} is required", param)
            case FunctionDefinition() as found:
                tool = build_tool(found.name, found.description, found.parameters, found.strict, param)
            case CustomDefinition() as found:
                parameters = _describe_format(found.format, f"{param}.format")
                tool = build_tool(found.name, found.description, parameters, True, param, "format")
        if tool.name in tools:
            raise InvalidRequest(f"{param}.name: {tool.name} appears twice", f"{param}.name")
        tools[tool.name] = tool
    return list(tools.values())


def list_custom_tools(definitions: list[ToolDefinition]) -> dict[str, ToolItem]:
    """Return the custom tools by their names."""
    customs = [definition.custom for definition in definitions if definition.type == "custom"]
    return {custom.name: ToolItem(custom.name, is_custom=True) for custom in customs if custom is not None}


def _describe_format(format: CustomInputFormat | None, param: str) -> dict[str, object]:
    """Describe the arguments of a custom tool. Raises InvalidRequest."""
    if format is None or format.type == "text":
        return describe_input()
    if format.grammar is None:
        raise InvalidRequest(f"{param}.grammar is required with type grammar", f"{param}.grammar")
    try:
        return describe_input(format.grammar.syntax, format.grammar.definition)
    except (GrammarError, LarkError) as error:
        raise InvalidRequest(f"{param}.grammar: {error}", f"{param}.grammar") from None


def build_tool(
    name: str,
    description: str | None,
    parameters: dict[str, object] | None,
    strict: bool | None,
    param: str,
    schema_field: str = "parameters",
) -> Tool:
    """Build a tool. param: the function's path in the request. schema_field: the name of `parameters` there. Raises
    InvalidRequest."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{param}.name must be 1 to 128 letters, digits, underscores, dots and dashes, not {name[:200]!r}",
            f"{param}.name",
        )
    schema = {"type": "object", **(parameters or {"properties": {}})}
    if schema["type"] != "object":
        raise InvalidRequest(f"{param}.{schema_field}.type must be object", f"{param}.{schema_field}.type")
    return Tool(name, description or "", schema, bool(strict), f"{param}.{schema_field}")


def read_tool_choice(choice: ToolChoiceFields | None, tools: list[ToolDefinition]) -> ToolChoice:
    """Raises InvalidRequest."""
    if choice is None:
        return ToolChoice("auto" if tools else "none")
    if choice.type in ("none", "auto"):
        return ToolChoice("none" if choice.type == "none" else "auto")
    if not tools:
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    if choice.type == "required":
        return ToolChoice("required")
    if choice.type in ("function", "custom"):
        return ToolChoice("required", (_find_named(choice, tools, "tool_choice"),), is_named=True)
    if choice.type == "allowed_tools":
        param = "tool_choice.allowed_tools"
        if choice.allowed_tools is None:
            raise InvalidRequest(f"{param} is required with type allowed_tools", param)
        if not choice.allowed_tools.tools:
            raise InvalidRequest(f"{param}.tools must not be empty", f"{param}.tools")
        allowed = enumerate(choice.allowed_tools.tools)
        names = tuple(_find_named(named, tools, f"{param}.tools[{index}]") for index, named in allowed)
        return ToolChoice(choice.allowed_tools.mode, names)
    raise InvalidRequest(
        f"tool_choice must be none, auto, required, or an object of type function, custom or allowed_tools, not "
        f"{choice.type[:200]!r}",
        "tool_choice",
    )


def _find_named(named: NamedTool, tools: list[ToolDefinition], param: str) -> str:
    """Raises InvalidRequest."""
    if named.type not in ("function", "custom"):
        raise InvalidRequest(f"{param}.type must be function or custom", f"{param}.type")
    param = f"{param}.{named.type}"
    found = named.custom if named.type == "custom" else named.function
    if found is None:
        raise InvalidRequest(f"{param} is required with type {named.type}", param)
    for tool in tools:
        if tool.type == named.type and tool.definition is not None and tool.definition.name == found.name:
            return found.name
    raise InvalidRequest(f"{param}.name: {found.name[:200]} is not one of the tools", f"{param}.name")
