"""`TurnForm`: everything that the grammar of a chat turn depends on, besides the model's dialect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import msgspec

from serve_llm.server.dialects.tool import Tool, ToolChoice
from serve_llm.server.structured_output.params import StructuredOutputs


class TurnForm(msgspec.Struct, frozen=True, kw_only=True):
    tools: tuple[Tool, ...]  # all tools of the request
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    in_reasoning: bool  # whether the prompt has opened the reasoning
    structured_outputs: StructuredOutputs | None  # for the content

    def list_parts(self) -> Iterator[StructuredOutputs]:
        """Yield what must be enforced inside the turn, as separate requests."""
        if self.structured_outputs is not None:
            yield self.structured_outputs
        for tool in self.tool_choice.select(self.tools):
            if self.tool_choice.binds(tool):
                yield StructuredOutputs(json=tool.parameters, param=tool.schema_param)

    @property
    def param(self) -> str:
        """The parameter named in an error about the whole turn."""
        wanted = self.structured_outputs
        return "tools" if wanted is None or self.tools else wanted.name_param(wanted.kind)


GrammarSource = StructuredOutputs | TurnForm


def encode_source(source: GrammarSource) -> bytes:
    """Encode as JSON: schemas may contain integers that msgpack cannot write."""
    return json.dumps([isinstance(source, TurnForm), msgspec.to_builtins(source)]).encode()


def decode_source(content: bytes) -> GrammarSource:
    is_turn, fields = json.loads(content)
    return msgspec.convert(fields, TurnForm) if is_turn else msgspec.convert(fields, StructuredOutputs)


def compute_key(source: GrammarSource) -> bytes:
    """Return a key that is equal if and only if the grammar and its errors are equal."""
    return hashlib.sha256(encode_source(source)).digest()


def name_param(source: GrammarSource) -> str:
    """Return the parameter named in an error about the whole source."""
    return source.param if isinstance(source, TurnForm) else source.name_param(source.kind)
