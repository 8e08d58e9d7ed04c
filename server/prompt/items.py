"""Turn the input items of the Responses API into what chat templates expect."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence

import msgspec

from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.custom_tools import CUSTOM_INPUT
from serve_llm.server.prompt.messages import begins_object, parse_arguments, read_string
from serve_llm.server.prompt.template import Message

Item = Mapping[str, object]

_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_COMPACTIONS = ("compaction", "compaction_summary")
_SUMMARY_HEADING = "Summary of the conversation so far:"
_HOSTED_ITEMS = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "computer_call",
        "computer_call_output",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "tool_search_call",
        "tool_search_output",
        "additional_tools",
        "configuration_update",
        "program",
        "program_output",
        "compaction_trigger",  # unless it is the last item
    }
)


class ToolItem(msgspec.Struct, frozen=True):
    """How a reply names a called tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False  # whether it takes a text instead of arguments


def join_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a tool of a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


class StoredItem(msgspec.Struct):
    """An item of a stored response. content: its JSON."""

    id: str
    content: bytes


def read_kind(item: Item) -> str | None:
    """Return the type, which messages and references to stored items may lack. None if it is not a string."""
    kind = item.get("type")
    if kind is None:
        return "item_reference" if "id" in item and not item.keys() & {"role", "content"} else "message"
    return kind if isinstance(kind, str) else None


def translate_items(
    instructions: str | None, items: str | Sequence[Item], history: Sequence[Item] = ()
) -> tuple[list[Message], list[str]]:
    """Return messages with roles system, user, assistant and tool, and the places of skipped items. Raises
    InvalidRequest, Unsupported.

    history: the stored items of the conversation that `items` continue.
    """
    translator = _ItemTranslator()
    if instructions:
        translator.add_system(instructions)
    for item in history:
        translator.add(item, "previous_response_id")
    translator.skipped.clear()  # they were named when they were sent
    if isinstance(items, str):
        translator.messages.append({"role": "user", "content": items})
        return translator.messages, []
    for index, item in enumerate(items):
        translator.add(item, f"input[{index}]")
    return translator.messages, translator.skipped


def continues_reply(items: str | Sequence[Item], history: Sequence[Item], messages: Sequence[Message]) -> bool:
    """Whether the conversation ends with an incomplete message of the assistant, which the reply continues.

    messages: from `translate_items`.
    """
    last = history[-1] if history else None
    if items:
        last = None if isinstance(items, str) else items[-1]
    if last is None or read_kind(last) != "message" or last.get("status") not in ("incomplete", "in_progress"):
        return False
    return messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def describe_items(items: str | Sequence[Item], response_id: str) -> list[StoredItem]:
    """Describe the items of a request as they are stored: each with an id and all fields, messages with parts. Call it
    after `translate_items`, which checks them. response_id: without prefix; new ids contain it."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    described = []
    for index, item in enumerate(items):
        full = {"status": "completed", **item, "type": read_kind(item)}
        if full["type"] == "reasoning":
            full.setdefault("summary", [])
        if not isinstance(full.get("id"), str):
            full["id"] = f"{_ID_PREFIXES.get(str(full['type']), 'item')}_{response_id}_in{index}"
        if full["type"] == "message":
            content = full["content"]
            if isinstance(content, str):
                kind = "output_text" if full.get("role") == "assistant" else "input_text"
                content = [{"type": kind, "text": content}]
            full["content"] = [_complete_part(part) for part in content]  # type: ignore[attr-defined]
        described.append(StoredItem(str(full["id"]), msgspec.json.encode(full)))
    return described


def _complete_part(part: Item) -> Item:
    return {"annotations": [], "logprobs": [], **part} if part["type"] == "output_text" else part


def keep_messages(history: Sequence[Item], items: str | Sequence[Item]) -> list[dict[str, object]]:
    """Return the messages of a conversation that are not the assistant's, which stay next to a summary."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [dict(item) for item in (*history, *items) if _is_kept(item)]


def drop_compacted(items: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return a conversation without the items that its last summary replaces."""
    summaries = [index for index, item in enumerate(items) if _read_summary(item)]
    if not summaries:
        return items
    return [item for item in items[: summaries[-1]] if _is_kept(item)] + items[summaries[-1] :]


def _is_kept(item: Item) -> bool:
    return read_kind(item) == "message" and item.get("role") != "assistant"


def _read_summary(item: Item) -> str | None:
    """Return the text of a compaction item written by this server."""
    encrypted = item.get("encrypted_content")
    if read_kind(item) not in _COMPACTIONS or not isinstance(encrypted, str):
        return None
    return decrypt_text(encrypted)


def encrypt_text(text: str) -> str:
    """Encode reasoning or a summary that a client sends back without reading it: the text is not secret here."""
    return base64.b64encode(text.encode()).decode()


def decrypt_text(text: str) -> str | None:
    """Decode what `encrypt_text` returned; None for any other text."""
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


class _ItemTranslator:
    """Adjacent items of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.skipped: list[str] = []
        self._names: dict[str, str] = {}  # called tools, by the id of the call
        self._cut_ids: set[str] = set()  # ids of truncated calls

    def add(self, item: Item, param: str) -> None:
        match read_kind(item):
            case None:
                raise InvalidRequest(f"{param}.type must be a string", f"{param}.type")
            case "message":
                self._add_message(item, param)
            case "function_call" if _is_cut(item):
                # Truncated arguments are not JSON, so no template could show them.
                self._cut_ids.add(read_string(item, "call_id", param))
                self.skipped.append(param)
            case "function_call":
                self._add_call(item, parse_arguments(item.get("arguments"), f"{param}.arguments"), param)
            case "custom_tool_call":
                self._add_call(item, {CUSTOM_INPUT: read_string(item, "input", param)}, param)
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(item, param)
            case "reasoning":
                text, is_encrypted = _read_reasoning(item, param)
                if is_encrypted:
                    self.skipped.append(f"{param}.encrypted_content")
                if text:
                    self._extend_reply("reasoning", text)
            case "compaction" | "compaction_summary":
                summary = _read_summary(item)
                if summary:
                    self._extend_reply("content", f"{_SUMMARY_HEADING}\n{summary}")
                else:
                    self.skipped.append(param)
            case "item_reference":
                raise InvalidRequest(f"{param}: the item is not stored here; send the item itself", param)
            case kind if kind in _HOSTED_ITEMS:
                self.skipped.append(param)
            case _:
                raise Unsupported(f"{param}: items of type {kind!r} are not supported", f"{param}.type")

    def add_system(self, text: str) -> None:
        """Add to the system message. Templates accept one, at the beginning."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            text = f"{self.messages.pop()['content']}\n\n{text}"
        self.messages.append({"role": "system", "content": text})

    def _add_message(self, item: Item, param: str) -> None:
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise InvalidRequest(f"{param}.role must be user, assistant, system or developer", f"{param}.role")
        text = read_text_parts(item.get("content"), f"{param}.content")
        if role == "assistant":
            self._extend_reply("content", text)
        elif role == "system":
            self.add_system(text)
        else:
            self.messages.append({"role": role, "content": text})

    def _add_call(self, item: Item, arguments: dict[str, object], param: str) -> None:
        call_id = read_string(item, "call_id", param)
        namespace = None if item.get("namespace") is None else read_string(item, "namespace", param)
        name = join_name(namespace, read_string(item, "name", param))
        self._names[call_id] = name
        call = {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}
        message = self._open_reply()
        message["tool_calls"] = [*message.get("tool_calls", []), call]  # type: ignore[misc]

    def _add_output(self, item: Item, param: str) -> None:
        call_id = read_string(item, "call_id", param)
        if call_id in self._cut_ids:
            self.skipped.append(param)
            return
        text = read_text_parts(item.get("output"), f"{param}.output")
        message: Message = {"role": "tool", "tool_call_id": call_id, "content": text}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        self.messages.append(message)

    def _extend_reply(self, field: str, text: str) -> None:
        message = self._open_reply()
        before = message.get(field)
        message[field] = f"{before}\n{text}" if before else text

    def _open_reply(self) -> Message:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]


def _is_cut(item: Item) -> bool:
    """Whether a call's arguments were truncated. A client that creates its own items may omit their status."""
    status = item.get("status")
    if status not in (None, "in_progress"):
        return status == "incomplete"
    arguments = item.get("arguments")
    return isinstance(arguments, str) and begins_object(arguments)


def _read_reasoning(item: Item, param: str) -> tuple[str, bool]:
    """Return the text, which may be a summary, and whether another server encrypted it, as in a conversation that began
    there."""
    text = _join_texts(item, "content", param)
    encrypted = item.get("encrypted_content")
    if text or not isinstance(encrypted, str):
        return text or _join_texts(item, "summary", param), False
    decrypted = decrypt_text(encrypted)
    return decrypted or _join_texts(item, "summary", param), decrypted is None


def _join_texts(item: Item, name: str, param: str) -> str:
    parts = item.get(name)
    if not parts:
        return ""
    if not isinstance(parts, list):
        raise InvalidRequest(f"{param}.{name} must be a list", f"{param}.{name}")
    return "\n".join(read_string(part, "text", f"{param}.{name}[{index}]") for index, part in enumerate(parts))


def read_text_parts(content: object, param: str) -> str:
    """Return a text, or parts of texts joined as lines. Raises InvalidRequest, Unsupported."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{param} must be a string or a list of parts", param)
    texts = []
    for number, part in enumerate(content):
        place = f"{param}[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise Unsupported(f"{place}: content of type {kind!r} is not supported, only text", place)
        texts.append(read_string(part, _TEXT_PARTS[kind], place))
    return "\n".join(texts)
