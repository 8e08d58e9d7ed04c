"""The text of documents and search results in messages of Anthropic's API."""

from __future__ import annotations

from collections.abc import Callable

from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.messages import read_string

Block = dict[str, object]

DOCUMENT_KINDS = frozenset({"document", "search_result"})


def read_document(block: Block, param: str, join_text: Callable[[object, str], str]) -> str:
    """Return what precedes the text, such as the title, and the text, as lines. join_text: reads blocks of text. Raises
    InvalidRequest, Unsupported."""
    is_document = block["type"] == "document"
    heads = [
        _read_optional(block, name, param) for name in (("title", "context") if is_document else ("title", "source"))
    ]
    text = _read_source(block, param, join_text) if is_document else join_text(block.get("content"), f"{param}.content")
    return "\n".join([*filter(None, heads), text])


def asks_for_citations(block: Block) -> bool:
    citations = block.get("citations")
    return isinstance(citations, dict) and bool(citations.get("enabled"))


def _read_source(block: Block, param: str, join_text: Callable[[object, str], str]) -> str:
    place = f"{param}.source"
    source = block.get("source")
    if not isinstance(source, dict):
        raise InvalidRequest(f"{place} must be an object", place)
    match source.get("type"):
        case "text":
            return read_string(source, "data", place)
        case "content":
            return join_text(source.get("content"), f"{place}.content")
        case kind:
            raise Unsupported(f"{place}: sources of type {kind!r} are not supported, only text and content", place)


def _read_optional(block: Block, name: str, param: str) -> str:
    return "" if block.get(name) is None else read_string(block, name, param)
