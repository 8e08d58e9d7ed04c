"""Turns as models write them, for every dialect, and the results of parsing a text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from serve_llm.server.dialects.dialect import (
    CallFormat,
    Dialect,
    GemmaCodec,
    JsonCodec,
    PythonicCodec,
    TaggedCodec,
    get_written_form,
)
from serve_llm.server.dialects.parser import DialectParser
from serve_llm.server.dialects.pieces import ArgumentsPiece, CallBegin, CallEnd, ContentPiece, Piece, ReasoningPiece
from serve_llm.server.dialects.tool import Tool

Arguments = dict[str, object]

# One dialect for each kind of call syntax, for tests that are slow with all dialects.
FEW_DIALECTS = ("hermes", "qwen3_5", "llama3_pythonic", "mistral_ids", "glm4_7", "harmony", "gemma4")

WEATHER = Tool(
    "get_weather",
    "Current weather.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "detailed": {"type": "boolean"},
            "limits": {"type": "object", "properties": {"low": {"type": "number"}}},
            "tags": {"type": "array", "items": {"type": "string"}},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city"],
    },
)
NOW = Tool("now", "The time.", {"type": "object", "properties": {}})
TOOLS = (WEATHER, NOW)


@dataclass
class ParsedCall:
    id: str
    name: str
    arguments: str = ""
    has_ended: bool = False


@dataclass
class Turn:
    """A turn joined from its pieces. Fails if they are out of order."""

    reasoning: str = ""
    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> Turn:
        for piece in pieces:
            match piece:
                case ReasoningPiece(text):
                    assert text
                    self.reasoning += text
                case ContentPiece(text):
                    assert text
                    self.content += text
                case CallBegin(index, call_id, name):
                    assert index == len(self.calls)
                    self.calls.append(ParsedCall(call_id, name))
                case ArgumentsPiece(index, text):
                    assert text and index == len(self.calls) - 1 and not self.calls[-1].has_ended
                    self.calls[-1].arguments += text
                case CallEnd(index):
                    assert index == len(self.calls) - 1 and not self.calls[-1].has_ended
                    self.calls[-1].has_ended = True
        return self

    def decode_calls(self) -> list[tuple[str, object]]:
        """Return names and arguments of the calls, all of which must be complete."""
        assert all(call.has_ended for call in self.calls)
        return [(call.name, json.loads(call.arguments)) for call in self.calls]


def create_parser(dialect: Dialect, tools: Sequence[Tool] = TOOLS, **options: object) -> DialectParser:
    return DialectParser(dialect, tools, generator=random.Random(0), **options)  # type: ignore[arg-type]


def parse(dialect: Dialect, *texts: str, **options: object) -> Turn:
    """Parse the texts in sequence."""
    parser = create_parser(dialect, **options)
    turn = Turn()
    for text in texts:
        turn.add(parser.push(text))
    return turn.add(parser.finish())


def write_turn(
    dialect: Dialect, *, reasoning: str = "", content: str = "", calls: Sequence[tuple[str, Arguments]] = ()
) -> str:
    """Return a turn as a model writes it."""
    messages: list[str] = []
    if reasoning:
        assert dialect.reasoning is not None
        messages.append(
            get_written_form(dialect.reasoning.open) + reasoning + get_written_form(dialect.reasoning.close)
        )
    if content:
        if dialect.content is not None:
            content = get_written_form(dialect.content.open) + content + get_written_form(dialect.content.close)
        messages.append(content)
    if calls:
        assert dialect.calls is not None
        lead = dialect.calls.lead or ("\n" if content and not dialect.calls.is_bare else "")
        if dialect.start:
            messages += [write_call(dialect.calls, name, given, number) for number, (name, given) in enumerate(calls)]
        else:
            messages.append(lead + write_section(dialect.calls, calls))
    return dialect.start.join(messages)


def write_section(form: CallFormat, calls: Sequence[tuple[str, Arguments]]) -> str:
    texts = [write_call(form, name, arguments, number) for number, (name, arguments) in enumerate(calls)]
    return get_written_form(form.section_open) + form.separator.join(texts) + get_written_form(form.section_close)


def write_call(form: CallFormat, name: str, arguments: Arguments, number: int) -> str:
    opening = get_written_form(form.open)
    close = get_written_form(form.close)
    codec = form.codec
    if isinstance(codec, JsonCodec) and codec.name_key:
        call: dict[str, object] = {codec.id_key: str(number)} if codec.id_key else {}
        call |= {codec.name_key: name, codec.arguments_key: arguments}
        return opening + json.dumps(call, ensure_ascii=False) + close
    written_id = str(number) if form.id_rule == "kimi" else f"abcdefgh{number}"
    head = opening + name + (form.id_open + written_id if form.id_open else "") + get_written_form(form.name_end)
    match codec:
        case JsonCodec():
            body = json.dumps(arguments, ensure_ascii=False)
        case TaggedCodec():
            body = "".join(_write_member(codec, key, value) for key, value in arguments.items())
        case PythonicCodec(json_literals=json_literals):
            body = ", ".join(f"{key}={_write_python(value, json_literals)}" for key, value in arguments.items())
        case GemmaCodec(quote=quote):
            body = _write_gemma(arguments, quote)
    return head + body + close


def _write_member(codec: TaggedCodec, key: str, value: object) -> str:
    is_string = isinstance(value, str)
    key_end = get_written_form(codec.key_end)
    if codec.json_key_end and not is_string:
        key_end = codec.json_key_end
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return get_written_form(codec.key_open) + key + key_end + written + get_written_form(codec.value_end)


def _write_python(value: object, json_literals: bool) -> str:
    match value:
        case dict():
            members = (f"{key!r}: {_write_python(item, json_literals)}" for key, item in value.items())
            return "{" + ", ".join(members) + "}"
        case list():
            return "[" + ", ".join(_write_python(item, json_literals) for item in value) + "]"
        case None | bool() if json_literals:
            return json.dumps(value)
        case _:
            return repr(value)


def _write_gemma(value: object, quote: str) -> str:
    match value:
        case dict():
            return "{" + ",".join(f"{key}:{_write_gemma(item, quote)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(_write_gemma(item, quote) for item in value) + "]"
        case str():
            return quote + value + quote
        case _:
            return json.dumps(value)
