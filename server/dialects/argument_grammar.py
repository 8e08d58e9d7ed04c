"""The grammar of a call's arguments in the codec of a dialect, bound to the tool's schema or only well-formed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

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
from serve_llm.server.dialects.schema_members import (
    CANNOT,
    Member,
    Schema,
    can_write_name,
    is_any_object,
    list_members,
    located,
    read_list,
    resolve_alone,
    resolve_object,
)
from serve_llm.server.dialects.schema_parts import detach_part
from serve_llm.server.dialects.schema_types import find_types
from serve_llm.server.dialects.string_grammar import split_schema, write_strings
from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.json_schema import KEYWORDS

MAX_DEPTH = 20  # objects and lists of a schema inside each other, where it is written out
_ANNOTATIONS = {"title", "description", "default"}
_NESTING = ("properties", "additionalProperties", "items", "prefixItems", "anyOf", "oneOf", "allOf")
_KEY = r"[A-Za-z_][A-Za-z0-9_.$-]{0,63}"
_NUMBER = r"-?(0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?([eE][-+]?[0-9]{1,3})?"


class ArgumentsWriter:
    """Writes into one grammar."""

    def __init__(self, lark: LarkWriter, write_schema: Callable[[object], object], names: Iterable[str] = ()) -> None:
        """write_schema: a JSON schema as llguidance takes it; raises GrammarError. names: that arguments may have
        besides plain ones, where no schema binds them."""
        self._lark = lark
        self._names = [name for name in dict.fromkeys(names) if re.fullmatch(_KEY, name) is None]
        self._write_schema = write_schema
        self._literals: dict[str, Symbol] = {}  # rules of any literal, by the quote
        self._targets: dict[str, Symbol] = {}  # rules of what the tool's schema refers to, by the reference

    def write(self, codec: Codec, schema: Schema | None) -> Symbols:
        """Everything between the name and the end of the call. schema: None for arguments that are only well-formed.

        Raises GrammarError.
        """
        schema = None if schema is None else _bind_object(schema)
        self._targets = {}
        match codec:
            case JsonCodec():
                return [self._add_json({**(schema or {}), "type": "object"}, {})]
            case TaggedCodec():
                return self._write_tagged(codec, schema)
            case PythonicCodec():
                return self._write_pythonic(codec, schema)
            case GemmaCodec(quote=quote):
                if schema is None:
                    return [self._write_quoted_object(quote)]
                return self._write_gemma_object(resolve_object(schema, schema), schema, quote, 0)

    def write_object(self, codec: JsonCodec, name: str, schema: Schema | None) -> Symbol:
        """A call as one JSON object. Raises GrammarError."""
        arguments = {**(_bind_object(schema) if schema else {}), "type": "object"}
        properties: dict[str, object] = {codec.id_key: {"type": "string"}} if codec.id_key else {}
        properties |= {codec.name_key: {"const": name}, codec.arguments_key: arguments}
        call = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        return self._add_json(call, schema or {})

    def _add_json(self, schema: Schema, root: Schema) -> Symbol:
        return self._lark.add_schema(self._write_schema(detach_part(schema, root)))

    def _write_key(self, codec: Codec) -> Symbol:
        """The name of any argument."""
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
        """An argument of any name and value between its delimiters."""
        opening = join(self._lark.write_text(get_written_form(codec.key_open)), [self._write_key(codec)])
        value_end = self._lark.write_text(get_written_form(codec.value_end))
        text = join([write_free_text(write_patterns(codec.value_end))], value_end)
        ways = [join(opening, self._lark.write_text(get_written_form(codec.key_end)), text)]
        if codec.json_key_end:
            ways.append(join(opening, self._lark.write_text(codec.json_key_end), [self._add_json({}, {})], value_end))
        return self._lark.add_rule(*ways)

    def _write_element(self, codec: TaggedCodec, member: Member, root: Schema) -> Symbol:
        """An argument between its delimiters."""
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

    # Arguments as literals.

    def _write_pythonic(self, codec: PythonicCodec, schema: Schema | None) -> Symbols:
        if schema is None:
            member = join([self._write_key(codec)], [write_literal("=")], [self._write_python_literal()])
            more = self._lark.repeat(join([write_regex(", ?")], member), "*")
            return [self._lark.repeat([*member, more], "?")]
        members: list[tuple[Symbols, bool]] = []
        for name, one, is_required in list_members(schema, schema, codec):
            with located("properties", name):
                literal = self._write_python_value(codec, one, schema)
            members.append((join([write_literal(f"{name}=")], [literal]), is_required))
        return self._write_members(members, ", ")

    def _write_python_value(self, codec: PythonicCodec, schema: object, root: Schema) -> Symbol:
        schema = resolve_alone(schema, root)
        types = set(find_types(schema, root))
        if codec.json_literals or not isinstance(schema, Mapping) or not types & {"boolean", "null"}:
            return self._add_json(schema if isinstance(schema, Mapping) else {}, root)
        kept = [name for name in sorted(types) if name not in ("boolean", "null")]
        rest: Schema | None = None
        if set(schema) <= {"type"} | _ANNOTATIONS:
            rest = {"type": kept}
        elif set(schema) <= {"anyOf"} | _ANNOTATIONS and _are_plain(schema["anyOf"], ("boolean", "null"), root):
            parts = schema["anyOf"]
            assert isinstance(parts, list)
            rest = {"anyOf": [part for part in parts if set(find_types(part, root)) & set(kept)]}
        if rest is None:
            return self._add_json(schema, root)
        constants = ["True", "False"] if "boolean" in types else []
        constants += ["None"] if "null" in types else []
        ways: list[Symbols] = [[write_literal(constant)] for constant in constants]
        return self._lark.add_rule(*ways, *([[self._add_json(rest, root)]] if kept else []))

    def _write_python_literal(self) -> Symbol:
        double = write_regex(r'"([^"\\\n]|\\.)*"')
        single = write_regex(r"'([^'\\\n]|\\.)*'")
        constants = write_regex("True|False|None|true|false|null")
        return self._write_literal("python", [[double], [single], [constants]], [[double], [single]])

    def _write_quoted_object(self, quote: str) -> Symbol:
        """Any object of a codec with quotes of its own."""
        self._write_quoted_literal(quote)
        return self._literals[f"{quote} object"]

    def _write_quoted_literal(self, quote: str) -> Symbol:
        """Any value of a codec with quotes of its own."""
        return self._write_literal(
            quote,
            [self._write_quoted(quote, write_free_text(write_patterns(quote))), [write_regex("true|false|null")]],
            [[self._write_key(GemmaCodec(quote=quote))]],
        )

    def _write_literal(self, name: str, scalars: Sequence[Symbols], keys: Sequence[Symbols]) -> Symbol:
        """Any value; keys: of objects."""
        if name in self._literals:
            return self._literals[name]
        value = self._lark.reserve_rule()
        key = self._lark.add_rule(*keys)
        comma = write_regex(", ?")
        member = join([key], [write_regex(": ?")], [value])
        members = self._lark.repeat([*member, self._lark.repeat(join([comma], member), "*")], "?")
        values = self._lark.repeat([value, self._lark.repeat(join([comma], [value]), "*")], "?")
        opened = self._lark.add_rule(join([write_literal("{")], [members], [write_literal("}")]))
        listed = self._lark.add_rule(join([write_literal("[")], [values], [write_literal("]")]))
        self._lark.define_rule(value, *scalars, [write_regex(_NUMBER)], [opened], [listed])
        self._literals[name] = value
        self._literals[f"{name} object"] = opened
        return value

    def _write_quoted(self, quote: str, text: Symbol) -> Symbols:
        end = self._lark.write_text(quote)
        return join(end, join([text], end))

    def _write_gemma(self, schema: object, root: Schema, quote: str, depth: int) -> Symbols:
        """A value of a codec with quotes of its own."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return self._write_gemma_value(schema, root, quote, depth)
        if reference not in self._targets:
            rule = self._targets[reference] = self._lark.reserve_rule()  # the schema may refer to itself
            self._lark.define_rule(rule, self._write_gemma_value(schema, root, quote, depth))
        return [self._targets[reference]]

    def _write_gemma_value(self, schema: object, root: Schema, quote: str, depth: int) -> Symbols:
        schema = resolve_alone(schema, root)
        if schema is True or (isinstance(schema, Mapping) and KEYWORDS.isdisjoint(schema)):
            return [self._write_quoted_literal(quote)]
        if depth > MAX_DEPTH:
            raise GrammarError(
                f"it holds more than {MAX_DEPTH} objects and lists inside each other",
                keyword=next((name for name in _NESTING if isinstance(schema, Mapping) and name in schema), None),
            )
        found = split_schema(schema, root)
        ways: list[Symbols] = []
        if found.strings:
            ways.append(self._write_quoted(quote, write_strings(found, quote)))
        for other in found.others:
            types = set(find_types(other, root))
            if types == {"object"}:
                ways.append(self._write_gemma_object(other, root, quote, depth))
            elif types == {"array"}:
                ways.append(self._write_gemma_list(other, root, quote, depth))
            elif types & {"object", "array"}:
                ways += [self._write_gemma(one, root, quote, depth + 1) for one in _split_types(other, root)]
            else:
                ways.append([self._add_json(other, root)])
        return ways[0] if len(ways) == 1 else [self._lark.add_rule(*ways)]

    def _write_gemma_object(self, schema: Schema, root: Schema, quote: str, depth: int) -> Symbols:
        if depth and is_any_object(schema):
            return [self._write_quoted_object(quote)]
        found = list_members(schema, root, GemmaCodec(quote=quote))
        others = schema.get("additionalProperties")
        if depth and not found and isinstance(others, Mapping):
            with located("additionalProperties"):
                other = self._write_gemma_item(others, root, quote, depth)
            member = self._lark.add_rule(join([write_regex(f"{_KEY}:")], [other]))
            more = self._lark.repeat(join([write_literal(",")], [member]), "*")
            return join([write_literal("{")], [self._lark.repeat([member, more], "?")], [write_literal("}")])
        members: list[tuple[Symbols, bool]] = []
        for name, one, is_required in found:
            with located("properties", name):
                value = self._write_gemma(one, root, quote, depth + 1)
            members.append((join([write_literal(f"{name}:")], value), is_required))
        return join([write_literal("{")], self._write_members(members, ","), [write_literal("}")])

    def _write_gemma_list(self, schema: Schema, root: Schema, quote: str, depth: int) -> Symbols:
        first_schemas, item_schema, least, most = read_list(schema)
        items: list[Symbols] = []
        for index, one in enumerate(first_schemas):
            with located("prefixItems", str(index)):
                items.append([self._write_gemma_item(one, root, quote, depth)])
        more: Symbols = []  # after `items`
        if most is None or most > len(items):
            with located("items"):
                item = self._write_gemma_item(item_schema, root, quote, depth)
            items += [[item]] * (max(least, 1) - len(items))
            if most != len(items):
                suffix = "*" if most is None else f"{{0,{most - len(items)}}}"
                more = [self._lark.repeat(join([write_literal(",")], [item]), suffix)]
        values: Symbols = more
        for index in range(len(items) - 1, -1, -1):
            values = join([write_literal(",")] if index else [], items[index], values)
            if index >= least:
                values = [self._lark.repeat(values, "?")]
        return join([write_literal("[")], values, [write_literal("]")])

    def _write_gemma_item(self, schema: object, root: Schema, quote: str, depth: int) -> Symbol:
        return self._lark.add_rule(self._write_gemma(schema, root, quote, depth + 1))

    def _write_members(self, members: Sequence[tuple[Symbols, bool]], separator: str) -> Symbols:
        """Members in their order, each with whether it is required, with a separator between two."""
        after: Symbols = []  # what follows when there has been a member
        first: Symbols = []  # what follows when there has been none
        for items, is_required in reversed(members):
            following = join([write_literal(separator)], items, after)
            begun = join(items, after)
            after, first = (
                (following if is_required else [self._lark.add_rule(following, after)]),
                (begun if is_required else [self._lark.add_rule(begun, first)]),
            )
        return first


def _bind_object(schema: Schema) -> Schema:
    """The schema of arguments, which are an object even where it allows null. Raises GrammarError."""
    if "$ref" in schema and "type" not in schema:
        return schema
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise GrammarError("it must be that of an object", keyword="type")
    return {**schema, "type": "object"}


def _split_types(schema: Schema, root: Schema) -> list[object]:
    """The ways that a schema of several types allows. Raises GrammarError."""
    branches = schema.get("anyOf")
    if isinstance(branches, list):
        return list(branches)
    if "type" not in schema:
        raise GrammarError(CANNOT, keyword=next((name for name in ("oneOf", "enum") if name in schema), "type"))
    return [{**schema, "type": name} for name in sorted(set(find_types(schema, root)))]


def _are_plain(branches: object, types: Sequence[str], root: Schema) -> bool:
    """Whether branches of these types allow every value of their type."""
    return isinstance(branches, list) and all(
        isinstance(part, Mapping) and set(part) <= {"type"} | _ANNOTATIONS
        for part in branches
        if set(find_types(part, root)) & set(types)
    )
