"""The grammar of a call's arguments in the codec of a dialect, bound to the tool's schema or just well-formed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from serve_llm.server.dialects.dialect import (
    Codec,
    GemmaCodec,
    JsonCodec,
    PythonicCodec,
    TaggedCodec,
    get_written_form,
)
from serve_llm.server.dialects.inline_values import split_values
from serve_llm.server.dialects.lark import (
    LarkWriter,
    Symbol,
    Symbols,
    join,
    write_free_text,
    write_literal,
    write_patterns,
    write_regex,
)
from serve_llm.server.dialects.literal_grammar import LiteralWriter
from serve_llm.server.dialects.schema_members import (
    Member,
    Schema,
    can_write_name,
    list_members,
    located,
)
from serve_llm.server.dialects.schema_parts import detach_part
from serve_llm.server.dialects.schema_types import find_types
from serve_llm.server.dialects.string_grammar import split_schema, write_strings
from serve_llm.server.structured_output.errors import GrammarError

_KEY = r"[A-Za-z_][A-Za-z0-9_.$-]{0,63}"


class ArgumentsWriter:
    """Writes arguments into one grammar."""

    def __init__(self, lark: LarkWriter, write_schema: Callable[[object], object], names: Iterable[str] = ()) -> None:
        """write_schema: returns a JSON schema as llguidance takes it; raises GrammarError. names: of arguments besides
        plain ones, if no schema restricts them."""
        self._lark = lark
        self._names = [name for name in dict.fromkeys(names) if re.fullmatch(_KEY, name) is None]
        self._write_schema = write_schema
        self._literals: LiteralWriter | None = None

    def write(self, codec: Codec, schema: Schema | None) -> Symbols:
        """Write everything between the name and the end of the call. schema: None for just well-formed arguments.

        Raises GrammarError.
        """
        schema = None if schema is None else _bind_object(schema)
        match codec:
            case JsonCodec():
                return [self._add_json({**(schema or {}), "type": "object"}, {})]
            case TaggedCodec():
                return self._write_tagged(codec, schema)
            case PythonicCodec() | GemmaCodec():
                if self._literals is None:
                    self._literals = LiteralWriter(codec, self._lark, self._add_json, self._write_key(codec))
                return self._literals.write(schema)

    def write_object(self, codec: JsonCodec, name: str, schema: Schema | None) -> Symbol:
        """Write a call as one JSON object. Raises GrammarError."""
        arguments = {**(_bind_object(schema) if schema else {}), "type": "object"}
        properties: dict[str, object] = {codec.id_key: {"type": "string"}} if codec.id_key else {}
        properties |= {codec.name_key: {"const": name}, codec.arguments_key: arguments}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        return self._add_json(call, schema or {})

    def _add_json(self, schema: Schema, root: Schema) -> Symbol:
        return self._lark.add_schema(self._write_schema(detach_part(schema, root)))

    def _write_key(self, codec: Codec) -> Symbol:
        """Write the name of any argument."""
        names = [write_literal(name).expression for name in self._names if can_write_name(name, codec)]
        return Symbol(f"({' | '.join((write_regex(_KEY).expression, *names))})", is_terminal=True)

    # Arguments between delimiters.

    def _write_tagged(self, codec: TaggedCodec, schema: Schema | None) -> Symbols:
        if schema is None:
            return [self._lark.repeat([self._write_any_element(codec)], "*")]
        elements: Symbols = []
        for member in list_members(schema, schema, codec):
            with located("properties", member.name):
                element = self._write_element(codec, member, schema)
            elements.append(element if member.is_required else self._lark.repeat([element], "?"))
        return elements

    def _write_any_element(self, codec: TaggedCodec) -> Symbol:
        """Write an argument of any name and value between its delimiters."""
        opening = join(self._lark.write_text(get_written_form(codec.key_open)), [self._write_key(codec)])
        value_end = self._lark.write_text(get_written_form(codec.value_end))
        text = join([write_free_text(write_patterns(codec.value_end))], value_end)
        ways = [join(opening, self._lark.write_text(get_written_form(codec.key_end)), text)]
        if codec.json_key_end:
            ways.append(join(opening, self._lark.write_text(codec.json_key_end), [self._add_json({}, {})], value_end))
        return self._lark.add_rule(*ways)

    def _write_element(self, codec: TaggedCodec, member: Member, root: Schema) -> Symbol:
        """Write an argument between its delimiters."""
        opening = self._lark.write_text(
            get_written_form(codec.key_open) + member.name + get_written_form(codec.key_end)
        )
        value_end = self._lark.write_text(get_written_form(codec.value_end))
        found = split_schema(member.schema, root)
        rest = found.others
        ways = []
        if found.strings and codec.json_key_end:
            ways.append(join(opening, [write_strings(found, codec.value_end)], value_end))
        elif found.strings:
            types = set(find_types(member.schema, root, nullable=True)) or {"string"}
            values = split_values(found.others, found.strings, types, root)
            text = write_strings(found, codec.value_end, values.excluded)
            text = Symbol(f"({' | '.join((text.expression, *values.expressions))})", is_terminal=True)
            ways.append(join(opening, [text], value_end))
            rest = values.rest
        if codec.json_key_end:
            opening = self._lark.write_text(get_written_form(codec.key_open) + member.name + codec.json_key_end)
        for other in rest:
            ways.append(join(opening, [self._add_json(other, root)], value_end))
        return self._lark.add_rule(*ways)


def _bind_object(schema: Schema) -> Schema:
    """Return the schema of arguments, which are an object even if it allows null. Raises GrammarError."""
    if "$ref" in schema and "type" not in schema:
        return schema
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise GrammarError("it must be the schema of an object", keyword="type")
    return {**schema, "type": "object"}
