"""The fields of chat requests that offer tools: `tools` and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve_llm.common.options.limits import Limits
from serve_llm.server.dialects.tool import Tool, ToolChoice
from serve_llm.server.http.errors import InvalidRequest, Unsupported

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


class ToolDefinition(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: str = Field(description="function")
    function: FunctionDefinition | None = None


class FunctionName(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class NamedTool(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionName


class AllowedTools(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True)]


class ToolChoiceFields(BaseModel):
    """A mode is read as an object of that type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: str = Field(description="function or allowed_tools.")
    function: FunctionName | None = Field(default=None, description="With type function: the one to call.")
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
        if definition.type != "function":
            raise Unsupported(f"{param}: tools of type {definition.type!r} are not supported, only function", param)
        function = definition.function
        if function is None:
            raise InvalidRequest(f"{param}.function is required", f"{param}.function")
        tools[function.name] = build_tool(
            function.name, function.description, function.parameters, function.strict, f"{param}.function"
        )
        if len(tools) <= index:
            raise InvalidRequest(f"{param}.function.name: {function.name} is there twice", f"{param}.function.name")
    return list(tools.values())


def build_tool(
    name: str,
    description: str | None,
    parameters: dict[str, object] | None,
    strict: bool | None,
    param: str,
    schema_field: str = "parameters",
) -> Tool:
    """param: the function's path in the request. schema_field: the name of `parameters` there. Raises
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
    if choice.type == "function":
        if choice.function is None:
            raise InvalidRequest("tool_choice.function is required with type function", "tool_choice.function")
        _check_known(choice.function.name, tools, "tool_choice.function.name")
        return ToolChoice("required", (choice.function.name,), is_named=True)
    if choice.type == "allowed_tools":
        param = "tool_choice.allowed_tools"
        if choice.allowed_tools is None:
            raise InvalidRequest(f"{param} is required with type allowed_tools", param)
        if not choice.allowed_tools.tools:
            raise InvalidRequest(f"{param}.tools must not be empty", f"{param}.tools")
        names = tuple(tool.function.name for tool in choice.allowed_tools.tools)
        for index, name in enumerate(names):
            _check_known(name, tools, f"{param}.tools[{index}].function.name")
        return ToolChoice(choice.allowed_tools.mode, names)
    raise InvalidRequest(
        f"tool_choice must be none, auto, required, or an object of type function or allowed_tools, not "
        f"{choice.type[:200]!r}",
        "tool_choice",
    )


def _check_known(name: str, tools: list[ToolDefinition], param: str) -> None:
    if all(tool.function is None or name != tool.function.name for tool in tools):
        raise InvalidRequest(f"{param}: {name[:200]} is none of the tools", param)
