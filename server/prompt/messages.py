"""Convert the messages of a conversation to the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic_core import from_json

from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.custom_tools import CUSTOM_INPUT
from serve_llm.server.prompt.template import Message, join_parts
from serve_llm.server.structured_output.json_schema import refuse_constant

_TEXT_FIELDS: dict[object, str] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "reasoning": "text",
}
"""By the type of a part, the field that holds its text."""


def plain_messages(messages: Sequence[Mapping[str, object]]) -> tuple[list[Message], list[str]]:
    """Drop null fields, convert contents to a text or to parts of type text, arguments of tool calls to objects, and
    the reasoning of earlier turns to `reasoning`. Other fields stay unchanged.

    Leaves out calls whose arguments were truncated, which no template could show, and their outputs; also returns their
    places. Raises Unsupported, InvalidRequest.
    """
    plain = []
    skipped = []
    cut_ids: set[object] = set()  # those of truncated calls
    names: dict[object, object] = {}  # functions called, by the id of the call
    old_ids: dict[object, str] = {}  # ids of calls in `function_call`, by the function's name
    for index, message in enumerate(messages):
        param = f"messages[{index}]"
        message = _replace_function_call(message, index, old_ids)
        fields = {name: value for name, value in message.items() if value is not None}
        content = message.get("content")
        reasoning = fields.pop("reasoning_content", None)
        if content is not None and not isinstance(content, str):
            content, thoughts = _read_parts(content, f"{param}.content")
            reasoning = reasoning or "\n".join(thoughts) or None
        fields["content"] = content
        if reasoning is not None and not fields.get("reasoning"):
            fields["reasoning"] = reasoning
        if fields.get("role") == "tool" and fields.get("tool_call_id") in cut_ids:
            skipped.append(param)
            continue
        calls = fields.pop("tool_calls", None)
        if isinstance(calls, list) and (cut := [number for number, call in enumerate(calls) if _is_cut(call)]):
            cut_ids |= {calls[number].get("id") for number in cut} - {None}
            skipped += [f"{param}.tool_calls[{number}]" for number in cut]
            calls = [call for number, call in enumerate(calls) if number not in cut]
            if not (calls or content or reasoning):
                continue
        if calls:
            parsed = _parse_calls(calls, f"{param}.tool_calls")
            names |= {call["id"]: call["function"]["name"] for call in parsed if "id" in call}  # type: ignore[index]
            fields["tool_calls"] = parsed
        if fields.get("role") == "tool" and "name" not in fields and fields.get("tool_call_id") in names:
            fields["name"] = names[fields["tool_call_id"]]
        plain.append(fields)
    return plain, skipped


def _replace_function_call(message: Mapping[str, object], index: int, ids: dict[object, str]) -> Mapping[str, object]:
    """Convert a call or its output from the form that `tool_calls` has replaced, which templates do not read.

    index: of the message. ids: by the function's name, the id of its last call. Raises InvalidRequest.
    """
    if message.get("role") == "function" and message.get("name") in ids:
        return {**message, "role": "tool", "tool_call_id": ids[message["name"]]}
    call = message.get("function_call")
    if call is None or message.get("tool_calls"):
        return message
    call_id = f"call{index:05d}"  # nine letters and digits, which some templates demand
    ids[read_string(call, "name", f"messages[{index}].function_call")] = call_id
    others = {name: value for name, value in message.items() if name != "function_call"}
    return {**others, "tool_calls": [{"id": call_id, "function": call}]}


def read_text(message: Message) -> str:
    """The text of a plain message's content."""
    content = message.get("content")
    if isinstance(content, list):
        return join_parts(content)
    return content if isinstance(content, str) else ""


def count_calls(messages: Sequence[Message]) -> int:
    """Tool calls in a conversation's plain messages."""
    return sum(len(calls) for message in messages if isinstance(calls := message.get("tool_calls"), list))


def _read_parts(content: object, param: str) -> tuple[list[Message], list[str]]:
    """The parts of a content with their text as `text`, and the texts of those that hold reasoning."""
    if not isinstance(content, list):
        raise InvalidRequest(f"{param} must be a string or a list of parts", param)
    parts: list[Message] = []
    reasoning: list[str] = []
    for number, part in enumerate(content):
        place = f"{param}[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_FIELDS:
            raise Unsupported(f"{place}: content of type {kind!r} is not supported, only text", place)
        field = _TEXT_FIELDS[kind]
        text = part.get(field)
        if not isinstance(text, str):
            raise InvalidRequest(f"{place}.{field} is required", f"{place}.{field}")
        if kind in ("thinking", "reasoning"):
            reasoning.append(text)
        else:
            others = {name: value for name, value in part.items() if name not in ("type", field)}
            parts.append({"type": "text", "text": text, **others})
    return parts, reasoning


def read_string(item: object, name: str, param: str) -> str:
    """A field that must be a string. param: where `item` is. Raises InvalidRequest."""
    value = item.get(name) if isinstance(item, Mapping) else None
    if not isinstance(value, str):
        raise InvalidRequest(f"{param}.{name} must be a string", f"{param}.{name}")
    return value


def _parse_calls(calls: object, param: str) -> list[Message]:
    """Tool calls with their arguments as objects."""
    if not isinstance(calls, list):
        raise InvalidRequest(f"{param} must be a list", param)
    parsed = []
    for number, call in enumerate(calls):
        place = f"{param}[{number}]"
        custom = call.get("custom") if isinstance(call, Mapping) else None
        if custom is not None:
            parsed.append(_parse_custom_call(call, custom, f"{place}.custom"))
            continue
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{place}.function.name is required", f"{place}.function.name")
        arguments = parse_arguments(function.get("arguments"), f"{place}.function.arguments")
        fields = {name: value for name, value in call.items() if value is not None}
        parsed.append({"type": "function", **fields, "function": {**function, "arguments": arguments}})
    return parsed


def _parse_custom_call(call: Mapping[str, object], custom: object, param: str) -> Message:
    """The call as that of a function."""
    function = {
        "name": read_string(custom, "name", param),
        "arguments": {CUSTOM_INPUT: read_string(custom, "input", param)},
    }
    others = {name: value for name, value in call.items() if name not in ("custom", "function") and value is not None}
    return {**others, "type": "function", "function": function}


def _is_cut(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    return isinstance(arguments, str) and begins_object(arguments)


def begins_object(text: str) -> bool:
    """Whether the text is a truncated JSON object."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        from_json(text)
    except ValueError as error:
        return str(error).startswith("EOF ")
    return False


def parse_arguments(arguments: object, param: str) -> dict[str, object]:
    """The arguments of an earlier call, which may be JSON text. Raises InvalidRequest."""
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if arguments in (None, "", "null"):
        return {}
    problem = "it must be a text"
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            problem = f"malformed JSON: {error}"
        else:
            if isinstance(found, dict):
                return found
            problem = "it must hold a JSON object"
    raise InvalidRequest(f"{param}: {problem}", param)
