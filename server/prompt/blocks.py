"""Turn the messages of Anthropic's API, with their content blocks, into what chat templates expect."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.items import decrypt_text, encrypt_text
from serve_llm.server.prompt.messages import read_string
from serve_llm.server.prompt.template import Message

Block = dict[str, object]

_BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins a block of Claude Code that Anthropic's servers take out of `system`. It differs between sessions, and in some
versions between requests, so that no prefix would be found in the cache."""

_DOCUMENT_KINDS = frozenset({"document", "search_result"})

_SERVER_BLOCKS = frozenset(
    {
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "mcp_tool_listing",
        "tool_addition",
        "tool_removal",
        "container_upload",
        "fallback",
    }
)
"""What Anthropic's servers leave in a conversation, and what only their tools read."""


_OMITTED = "omitted."
"""Begins the signature of a thinking block without text, which holds the text."""


def sign_thinking(text: str, *, is_omitted: bool) -> str:
    """Return the signature of a thinking block. Clients require one; it contains a text if the block omits that."""
    return _OMITTED + encrypt_text(text) if is_omitted else hashlib.sha256(text.encode()).hexdigest()


def _read_thinking(block: Block, param: str) -> str:
    """Return "" if another server wrote a block without text."""
    text = read_string(block, "thinking", param)
    signature = block.get("signature")
    if text or not isinstance(signature, str) or not signature.startswith(_OMITTED):
        return text
    return decrypt_text(signature.removeprefix(_OMITTED)) or ""


class BlockMessage(Protocol):
    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str | list[Block]: ...


def translate_messages(
    system: str | list[Block] | None, messages: Sequence[BlockMessage]
) -> tuple[list[Message], list[str]]:
    """Return messages with roles system, user, assistant and tool, and the places of skipped blocks. Raises
    InvalidRequest, Unsupported."""
    translator = _BlockTranslator()
    if text := _read_system(system):
        translator.messages.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        translator.add(message, f"messages[{index}].content")
    return translator.messages, translator.skipped


def continues_reply(messages: Sequence[BlockMessage]) -> bool:
    """Whether the last message is the beginning of the reply. Raises InvalidRequest if it ends with a call."""
    if not messages or messages[-1].role != "assistant":
        return False
    blocks = messages[-1].content
    if isinstance(blocks, list) and any(block.get("type") == "tool_use" for block in blocks):
        param = f"messages[{len(messages) - 1}].content"
        raise InvalidRequest(f"{param}: a tool_use block must be followed by a tool_result block", param)
    return True


def _read_system(system: str | list[Block] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return "\n".join(text for text in _read_texts(system, "system") if not text.startswith(_BILLING_HEADER))


class _BlockTranslator:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.skipped: list[str] = []
        self._names: dict[str, str] = {}  # called tools, by the id of the call

    def add(self, message: BlockMessage, param: str) -> None:
        if isinstance(message.content, str):
            self.messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            self._add_reply(message.content, param)
        elif message.role == "user":
            self._add_input(message.content, param)
        else:
            self.messages.append({"role": "system", "content": _join_text(message.content, param, self.skipped)})

    def _add_reply(self, blocks: list[Block], param: str) -> None:
        """Add an earlier turn of the assistant."""
        texts: list[str] = []
        reasoning: list[str] = []
        calls: list[Message] = []
        for number, block in enumerate(blocks):
            place = f"{param}[{number}]"
            match block.get("type"):
                case "text":
                    texts.append(read_string(block, "text", place))
                case "thinking":
                    reasoning.append(_read_thinking(block, place))
                case "redacted_thinking":
                    pass  # only its author can read it
                case "compaction" if block.get("content") is not None:
                    texts.append(read_string(block, "content", place))  # the summary of the earlier conversation
                case "compaction":
                    self.skipped.append(place)
                case "tool_use":
                    calls.append(self._translate_call(block, place))
                case str(kind) if kind in _SERVER_BLOCKS:
                    self.skipped.append(place)
                case kind:
                    raise _unsupported(kind, place, "text, thinking and tool_use")
        message: Message = {"role": "assistant", "content": "\n".join(texts)}
        if any(reasoning):
            message["reasoning"] = "\n".join(filter(None, reasoning))
        if calls:
            message["tool_calls"] = calls
        self.messages.append(message)

    def _translate_call(self, block: Block, param: str) -> Message:
        call_id = read_string(block, "id", param)
        name = read_string(block, "name", param)
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{param}.input must be an object", f"{param}.input")
        self._names[call_id] = name
        return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}

    def _add_input(self, blocks: list[Block], param: str) -> None:
        """Add user messages and tool results in order; adjacent texts become one message."""
        texts: list[str] = []
        has_results = False
        for number, block in enumerate(blocks):
            place = f"{param}[{number}]"
            match block.get("type"):
                case "text":
                    texts.append(read_string(block, "text", place))
                case "tool_result":
                    if texts:
                        self.messages.append({"role": "user", "content": "\n".join(texts)})
                        texts = []
                    has_results = True
                    self.messages.append(self._translate_result(block, place))
                case str(kind) if kind in _DOCUMENT_KINDS:
                    texts.append(_read_document(block, place, self.skipped))
                case str(kind) if kind in _SERVER_BLOCKS:
                    self.skipped.append(place)
                case kind:
                    raise _unsupported(kind, place, "text, document, search_result and tool_result")
        if texts or not has_results:
            self.messages.append({"role": "user", "content": "\n".join(texts)})

    def _translate_result(self, block: Block, param: str) -> Message:
        call_id = read_string(block, "tool_use_id", param)
        content = block.get("content")
        text = "" if content is None else _join_text(content, f"{param}.content", self.skipped)
        is_error = block.get("is_error")
        if not isinstance(is_error, bool | None):
            raise InvalidRequest(f"{param}.is_error must be a boolean", f"{param}.is_error")
        message: Message = {"role": "tool", "tool_call_id": call_id, "content": _mark_error(text) if is_error else text}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        return message


def _mark_error(text: str) -> str:
    """Return the text of a failed call. Chat templates have no other place for the failure."""
    if text.lower().startswith(("error", "<tool_use_error>")):
        return text
    return f"Error: {text}" if text else "Error"


def _join_text(content: object, param: str, skipped: list[str] | None = None) -> str:
    return content if isinstance(content, str) else "\n".join(_read_texts(content, param, skipped))


def _read_texts(blocks: object, param: str, skipped: list[str] | None = None) -> list[str]:
    """skipped: receives the places of references to tools, which Anthropic's servers turn into definitions, of other
    blocks that only these servers read, and of citations of documents; None: they are not allowed here."""
    if not isinstance(blocks, list):
        raise InvalidRequest(f"{param} must be a string or a list of blocks", param)
    texts = []
    for number, block in enumerate(blocks):
        place = f"{param}[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if skipped is not None and isinstance(kind, str) and kind in _SERVER_BLOCKS | {"tool_reference"}:
            skipped.append(place)
            continue
        if isinstance(kind, str) and kind in _DOCUMENT_KINDS and skipped is not None:
            texts.append(_read_document(block, place, skipped))
            continue
        if kind != "text":
            raise _unsupported(kind, place, "text")
        texts.append(read_string(block, "text", place))
    return texts


def _read_document(block: Block, param: str, skipped: list[str]) -> str:
    """Return what precedes the text, such as the title, and the text, as lines. skipped: receives the place of
    citations, which the model does not produce."""
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        skipped.append(f"{param}.citations")
    is_document = block["type"] == "document"
    names = ("title", "context" if is_document else "source")
    heads = ["" if block.get(name) is None else read_string(block, name, param) for name in names]
    text = _read_source(block, param) if is_document else _join_text(block.get("content"), f"{param}.content")
    return "\n".join([*filter(None, heads), text])


def _read_source(block: Block, param: str) -> str:
    place = f"{param}.source"
    source = block.get("source")
    if not isinstance(source, dict):
        raise InvalidRequest(f"{place} must be an object", place)
    match source.get("type"):
        case "text":
            return read_string(source, "data", place)
        case "content":
            return _join_text(source.get("content"), f"{place}.content")
        case kind:
            raise Unsupported(f"{place}: sources of type {kind!r} are not supported, only text and content", place)


def _unsupported(kind: object, param: str, supported: str) -> Unsupported:
    return Unsupported(f"{param}: blocks of type {kind!r} are not supported here, only {supported}", param)
