"""The tools that a model may call, and what a request says about calling them."""

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
    strict: bool = False  # whether arguments must match the schema even if the model chooses whether to call
    schema_param: str = ""  # the name of `parameters` in errors

    @property
    def argument_schema(self) -> dict[str, object]:
        """Return the schema that the arguments must match.

        A function whose `parameters` are omitted, or name no properties and say nothing else, takes no arguments. As a
        JSON schema they would allow any.
        """
        parameters = self.parameters or _NO_PARAMETERS
        if parameters.get("properties") != {} or parameters.get("required") or parameters.keys() - _SAYING_NOTHING_ELSE:
            return parameters
        return {**parameters, "additionalProperties": False}


class ToolChoice(msgspec.Struct, frozen=True):
    """`names`: the tools that may be called; None: all tools of the request."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    is_named: bool = False  # whether the request names the one function to call

    def select(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools that may be called."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in tools if self.names is None or tool.name in self.names)

    def binds(self, tool: Tool) -> bool:
        """Whether the arguments of a call must match the tool's schema."""
        return tool.strict or self.mode == "required"
