"""The format of the text in Anthropic's API: output_config.format, earlier called output_format."""

from __future__ import annotations

from typing import Protocol

from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.structured_output.params import StructuredOutputs


class HasJsonSchema(Protocol):
    @property
    def json_schema(self) -> dict[str, object]: ...


def read_output_format(in_config: HasJsonSchema | None, earlier: HasJsonSchema | None) -> StructuredOutputs | None:
    """in_config: output_config.format. earlier: output_format. Raises InvalidRequest if both are given."""
    if in_config is not None and earlier is not None:
        raise InvalidRequest("output_format and output_config.format exclude each other", "output_format")
    if in_config is not None:
        return StructuredOutputs(json=in_config.json_schema, param="output_config.format.schema")
    if earlier is not None:
        return StructuredOutputs(json=earlier.json_schema, param="output_format.schema")
    return None
