"""Tools of the Responses API: functions, custom tools that take a text, and namespaces of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import ConfigDict, Field

from serve_llm.common.options.limits import Limits
from serve_llm.server.dialects.tool import Tool, ToolChoice
from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.custom_tools import describe_input, wrap_input
from serve_llm.server.prompt.items import ToolItem, join_name
from serve_llm.server.schema.common import TranslatedBody
from serve_llm.server.schema.tools import build_tool, check_num_tools
from serve_llm.server.structured_output.errors import GrammarError, LarkError, UnsupportedLark
from serve_llm.server.structured_output.lark_regex import nests_without_end

_HOSTED_TOOLS = frozenset(
    {
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "file_search",
        "computer",
        "computer_use_preview",
        "computer-preview",
        "code_interpreter",
        "image_generation",
        "mcp",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
        "programmatic_tool_calling",
    }
)


class CustomFormat(TranslatedBody):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class NamespaceMember(TranslatedBody):
    type: str = Field(description="function or custom.")
    name: str | None = None
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None
    format: CustomFormat | None = Field(default=None, description="Of a custom tool: a regex or a Lark grammar.")


class FlatTool(NamespaceMember):
    """Keeps unknown fields, which belong to hosted tools, so that the reply can repeat the tool."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="function, custom or namespace. Tools that run on OpenAI's servers are skipped.")
    tools: Annotated[list[NamespaceMember], Field(fail_fast=True)] | None = Field(
        default=None, description="Of a namespace."
    )


class FlatToolName(TranslatedBody):
    type: str
    name: str | None = None
    namespace: str | None = None


class FlatToolChoice(FlatToolName):
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[FlatToolName], Field(fail_fast=True)] | None = None


class _Entry(NamedTuple):
    param: str
    definition: NamespaceMember
    namespace: str | None = None
    introduction: str | None = None  # description of the namespace, before its first member's


def read_tools(definitions: Sequence[FlatTool], limits: Limits) -> tuple[list[Tool], list[str]]:
    """Read the tools. Also returns the places of what is skipped. Raises InvalidRequest, Unsupported."""
    entries = list(_list_entries(definitions))
    check_num_tools(entries, limits)
    tools: dict[str, Tool] = {}
    skipped = []
    for param, definition, namespace, introduction in entries:
        if definition.type in _HOSTED_TOOLS:
            skipped.append(param)
            continue
        if definition.type not in ("function", "custom"):
            raise Unsupported(f"{param}: tools of type {definition.type[:200]!r} are not supported", f"{param}.type")
        if definition.name is None:
            raise InvalidRequest(f"{param}.name is required", f"{param}.name")
        name = join_name(namespace, definition.name)
        if name in tools:
            raise InvalidRequest(f"{param}.name: {name[:200]} appears twice", f"{param}.name")
        parameters = definition.parameters
        strict = definition.strict
        schema_field = "parameters"
        if definition.type == "custom":
            strict = True
            schema_field = "format"
            parameters, is_exact = _describe_input(definition.format, param)
            if not is_exact:
                skipped.append(f"{param}.format")
        description = "\n\n".join(filter(None, (introduction, definition.description)))
        tools[name] = build_tool(name, description, parameters, strict, param, schema_field)
    return list(tools.values()), skipped


def describe_tools(definitions: Sequence[FlatTool]) -> dict[str, ToolItem]:
    """Describe the tools by the name that the model calls."""
    items = {}
    for _, definition, namespace, _ in _list_entries(definitions):
        if definition.name is not None:
            name = join_name(namespace, definition.name)
            items[name] = ToolItem(definition.name, namespace, is_custom=definition.type == "custom")
    return items


def read_tool_choice(
    choice: Literal["none", "auto", "required"] | FlatToolChoice | None,
    tools: list[Tool],
    definitions: Sequence[FlatTool],
    skipped: list[str],
) -> ToolChoice:
    """Read the tool choice. One that names skipped tools becomes auto, or none without others, and is added to
    `skipped`. Raises InvalidRequest, Unsupported."""
    any_tool = ToolChoice("auto" if tools else "none")
    if choice is None or choice == "auto":
        return any_tool
    if choice == "none":
        return ToolChoice("none")
    has_hosted = any(definition.type in _HOSTED_TOOLS for definition in definitions)
    if not tools and not has_hosted:
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    if choice == "required" and tools:
        return ToolChoice("required")
    if choice == "required" or (has_hosted and choice.type in _HOSTED_TOOLS):
        skipped.append("tool_choice")
        return any_tool
    if choice.type in ("function", "custom"):
        return ToolChoice("required", (_find_tool(choice, tools, "tool_choice"),), is_named=True)
    if choice.type == "allowed_tools":
        names = _list_allowed(choice, tools, definitions)
        if names:
            return ToolChoice(choice.mode or "auto", names)
        if choice.tools and has_hosted:
            skipped.append("tool_choice")
            return ToolChoice("none")
        raise InvalidRequest("tool_choice.tools must name a function", "tool_choice.tools")
    raise Unsupported(f"tool_choice of type {choice.type[:200]!r} is not supported", "tool_choice.type")


def _list_allowed(choice: FlatToolChoice, tools: list[Tool], definitions: Sequence[FlatTool]) -> tuple[str, ...]:
    """Return the names that the model calls of the tools in a choice of type allowed_tools. Raises InvalidRequest."""
    items = describe_tools(definitions)
    names: dict[str, None] = {}
    for index, allowed in enumerate(choice.tools or []):
        param = f"tool_choice.tools[{index}]"
        if allowed.type == "namespace":
            if allowed.name is None:
                raise InvalidRequest(f"{param}.name is required", f"{param}.name")
            names |= {tool.name: None for tool in tools if items[tool.name].namespace == allowed.name}
        elif allowed.type not in _HOSTED_TOOLS:
            names[_find_tool(allowed, tools, param)] = None
    return tuple(names)


def _list_entries(definitions: Sequence[FlatTool]) -> Iterator[_Entry]:
    """List all tools, including those in namespaces. Raises InvalidRequest."""
    for index, definition in enumerate(definitions):
        param = f"tools[{index}]"
        if definition.type != "namespace":
            yield _Entry(param, definition)
            continue
        if definition.name is None:
            raise InvalidRequest(f"{param}.name is required", f"{param}.name")
        introduction = definition.description
        for number, member in enumerate(definition.tools or []):
            yield _Entry(f"{param}.tools[{number}]", member, definition.name, introduction)
            introduction = None


def _describe_input(format: CustomFormat | None, param: str) -> tuple[dict[str, object], bool]:
    """Return a custom tool's parameters as those of a function, and whether they allow every text of its format and no
    other. Raises InvalidRequest."""
    if format is None or format.type == "text":
        return describe_input(), True
    if format.definition is None or format.syntax is None:
        name = "syntax" if format.syntax is None else "definition"
        raise InvalidRequest(f"{param}.format.{name} is required", f"{param}.format.{name}")
    try:
        schema = describe_input(format.syntax, format.definition)
        return schema, format.syntax != "lark" or not nests_without_end(format.definition)
    except (GrammarError, LarkError) as error:
        if not isinstance(error, UnsupportedLark):
            raise InvalidRequest(f"{param}.format: {error}", f"{param}.format") from None
        description = f"A text of this Lark grammar:\n{format.definition}"
        return wrap_input({"type": "string", "description": description}), False


def _find_tool(wanted: FlatToolName, tools: list[Tool], param: str) -> str:
    """Return the name that the model calls. Raises InvalidRequest."""
    if wanted.name is None:
        raise InvalidRequest(f"{param}.name is required", f"{param}.name")
    name = join_name(wanted.namespace, wanted.name)
    if all(name != tool.name for tool in tools):
        raise InvalidRequest(f"{param}.name: {name[:200]} is not one of the tools", f"{param}.name")
    return name
