"""Turn the messages of Anthropic's API, with their content blocks, into what chat templates expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.messages import read_string
from serve_llm.server.prompt.template import Message

Block = dict[str, object]

_BILLING_HEADER = "x-anthropic-billing-header:"
"""Begins a block of Claude Code that Anthropic's servers take out of `system`. It differs between sessions, and in some
versions between requests, so that no prefix would be found in the cache."""


class BlockMessage(Protocol):
    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str | list[Block]: ...


def translate_messages(system: str | list[Block] | None, messages: Sequence[BlockMessage]) -> list[Message]:
    """Messages with roles system, user, assistant and tool. Raises InvalidRequest, Unsupported."""
    translated: list[Message] = []
    if text := _read_system(system):
        translated.append({"role": "system", "content": text})
    names: dict[str, str] = {}  # tools called, by the id of the call
    for index, message in enumerate(messages):
        param = f"messages[{index}].content"
        if isinstance(message.content, str):
            translated.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            translated.append(_translate_reply(message.content, param, names))
        elif message.role == "user":
            translated += _translate_input(message.content, param, names)
        else:
            translated.append({"role": "system", "content": _join_text(message.content, param)})
    return translated


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


def _translate_reply(blocks: list[Block], param: str, names: dict[str, str]) -> Message:
    """An earlier turn of the assistant."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Message] = []
    for number, block in enumerate(blocks):
        place = f"{param}[{number}]"
        match block.get("type"):
            case "text":
                texts.append(read_string(block, "text", place))
            case "thinking":
                reasoning.append(read_string(block, "thinking", place))
            case "redacted_thinking":
                pass  # nobody but its author can read it
            case "tool_use":
                calls.append(_translate_call(block, place, names))
            case kind:
                raise _unsupported(kind, place, "text, thinking and tool_use")
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if reasoning:
        message["reasoning"] = "\n".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


def _translate_call(block: Block, param: str, names: dict[str, str]) -> Message:
    call_id = read_string(block, "id", param)
    name = read_string(block, "name", param)
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{param}.input must be an object", f"{param}.input")
    names[call_id] = name
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _translate_input(blocks: list[Block], param: str, names: dict[str, str]) -> list[Message]:
    """What the user says and what tools returned, in order; adjacent texts become one message."""
    messages: list[Message] = []
    texts: list[str] = []
    for number, block in enumerate(blocks):
        place = f"{param}[{number}]"
        match block.get("type"):
            case "text":
                texts.append(read_string(block, "text", place))
            case "tool_result":
                if texts:
                    messages.append({"role": "user", "content": "\n".join(texts)})
                    texts = []
                messages.append(_translate_result(block, place, names))
            case kind:
                raise _unsupported(kind, place, "text and tool_result")
    if texts or not messages:
        messages.append({"role": "user", "content": "\n".join(texts)})
    return messages


def _translate_result(block: Block, param: str, names: dict[str, str]) -> Message:
    call_id = read_string(block, "tool_use_id", param)
    content = block.get("content")
    text = "" if content is None else _join_text(content, f"{param}.content")
    message: Message = {"role": "tool", "tool_call_id": call_id, "content": text}
    if call_id in names:
        message["name"] = names[call_id]
    return message


def _join_text(content: object, param: str) -> str:
    return content if isinstance(content, str) else "\n".join(_read_texts(content, param))


def _read_texts(blocks: object, param: str) -> list[str]:
    if not isinstance(blocks, list):
        raise InvalidRequest(f"{param} must be a string or a list of blocks", param)
    texts = []
    for number, block in enumerate(blocks):
        place = f"{param}[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind != "text":
            raise _unsupported(kind, place, "text")
        texts.append(read_string(block, "text", place))
    return texts


def _unsupported(kind: object, param: str, supported: str) -> Unsupported:
    return Unsupported(f"{param}: blocks of type {kind!r} are not supported here, only {supported}", param)
