"""Tools that a model may call, and what a request says about calling them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

_NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}}
_SAYING_NOTHING_ELSE = frozenset(("$schema", "description", "properties", "required", "title", "type"))


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str = ""
    parameters: dict[str, object] = msgspec.field(default_factory=dict)  # JSON schema of the arguments
    strict: bool = False  # whether arguments must be valid under the schema even where calling is the model's choice
    schema_param: str = ""  # how errors name `parameters`

    @property
    def argument_schema(self) -> dict[str, object]:
        """The schema that binds the arguments.

        A function whose `parameters` are omitted, or name no properties and say nothing else, takes no arguments. As a
        JSON schema they would allow any.
        """
        parameters = self.parameters or _NO_PARAMETERS
        if parameters.get("properties") != {} or parameters.get("required") or parameters.keys() - _SAYING_NOTHING_ELSE:
            return parameters
        return {**parameters, "additionalProperties": False}


class ToolChoice(msgspec.Struct, frozen=True):
    """`names` None: all tools of the request may be called, else these."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    is_named: bool = False  # whether the request names the one function to call

    def select(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in tools if self.names is None or tool.name in self.names)

    def binds(self, tool: Tool) -> bool:
        """Whether the arguments of a call must be valid under the tool's schema."""
        return tool.strict or self.mode == "required"
