"""The reader of a call's arguments in the codec of a dialect."""

from __future__ import annotations

from serve_llm.server.dialects.dialect import CallFormat, GemmaCodec, JsonCodec, PythonicCodec, TaggedCodec
from serve_llm.server.dialects.json_codec import ArgumentsReader, JsonReader, ObjectReader
from serve_llm.server.dialects.literal_codec import LiteralReader
from serve_llm.server.dialects.tagged_codec import TaggedReader
from serve_llm.server.dialects.tool import Tool


def create_reader(calls: CallFormat, tool: Tool | None) -> ArgumentsReader:
    """tool: None if the call names no known tool."""
    match calls.codec:
        case JsonCodec(name_key=""):
            return JsonReader()
        case JsonCodec(arguments_key=key):
            return ObjectReader(key)
        case TaggedCodec() as codec:
            return TaggedReader(codec, calls.close, tool)
        case PythonicCodec():
            return LiteralReader(None)
        case GemmaCodec(quote=quote):
            return LiteralReader(quote)
