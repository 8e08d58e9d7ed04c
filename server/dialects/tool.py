"""Tools that a model may call, and what a request says about calling them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class Tool(msgspec.Struct, frozen=True):
    name: str
    description: str = ""
    parameters: dict[str, object] = msgspec.field(default_factory=dict)  # JSON schema of the arguments
    strict: bool = False  # whether arguments must be valid under the schema even where calling is the model's choice
    schema_param: str = ""  # how errors name `parameters`


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
