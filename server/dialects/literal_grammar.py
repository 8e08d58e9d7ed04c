"""The grammar of arguments in literals: Python's, or an object with bare keys and strings in special quotes.

Python's strings may have either kind of quotes. What cannot be enforced in Python's literals is written as JSON, which
the parser also reads; what cannot be enforced in special quotes is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from serve_llm.server.dialects.dialect import GemmaCodec, JsonCodec, PythonicCodec
from serve_llm.server.dialects.inline_values import list_alternatives, list_parts
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
    GENERAL,
    Schema,
    is_any_object,
    list_members,
    located,
    read_list,
    resolve_alone,
    resolve_object,
)
from serve_llm.server.dialects.schema_types import find_types
from serve_llm.server.dialects.string_grammar import SplitSchema, split_schema, write_string, write_strings
from serve_llm.server.structured_output.errors import GrammarError
from serve_llm.server.structured_output.schema_walk import KEYWORDS

MAX_DEPTH = 20  # maximum nesting of a schema's objects and lists that are written out
_NESTING = ("properties", "additionalProperties", "items", "prefixItems", "anyOf", "oneOf", "allOf")
_CHOOSING = ("enum", "const", "anyOf", "oneOf", "type")
_NUMBER = r"-?(0|[1-9][0-9]{0,300})(\.[0-9]{1,300})?([eE][-+]?[0-9]{1,3})?"
_IN_SINGLE_QUOTES = r"""([^'\\\x00-\x1f]|\\['"\\nrtbf])*"""
_CONSTANTS = {None: "None", True: "True", False: "False"}


class LiteralWriter:
    """Writes arguments into one grammar."""

    def __init__(
        self,
        codec: PythonicCodec | GemmaCodec,
        lark: LarkWriter,
        add_json: Callable[[Schema, Schema], Symbol],
        key: Symbol,
    ) -> None:
        """add_json: adds a part of a whole schema, in JSON. key: a bare name, where no schema determines it."""
        self._codec = codec
        self._quote = codec.quote if isinstance(codec, GemmaCodec) else None
        self._constants = isinstance(codec, PythonicCodec) and not codec.json_literals
        self._lark = lark
        self._add_json = add_json
        self._key = key
        self._comma = write_literal(",") if self._quote is not None else write_regex(", ?")
        self._any: tuple[Symbol, Symbol] | None = None
        self._targets: dict[str, Symbol] = {}  # rules of what the tool's schema refers to, by reference

    def write(self, schema: Schema | None) -> Symbols:
        """Write all arguments. schema: None for arguments that are just well-formed. Raises GrammarError."""
        self._targets = {}
        if schema is None:
            return self._write_any_arguments()
        if self._quote is not None:
            return self._write_object(resolve_object(schema, schema), schema, 0)
        members: list[tuple[Symbols, bool]] = []
        for name, one, is_required in list_members(schema, schema, self._codec):
            with located("properties", name):
                value = self._write_value(one, schema, 1)
            members.append((join([write_literal(f"{name}=")], value), is_required))
        return self._write_members(members)

    # Values without a schema.

    def _write_any_arguments(self) -> Symbols:
        value, any_object = self._write_any()
        if self._quote is not None:
            return [any_object]
        member = join([self._key], [write_literal("=")], [value])
        return [self._lark.repeat([*member, self._lark.repeat(join([write_regex(", ?")], member), "*")], "?")]

    def _write_any(self) -> tuple[Symbol, Symbol]:
        """Write any value, and any object."""
        if self._any is not None:
            return self._any
        if self._quote is not None:
            text = write_free_text(write_patterns(self._quote))
            scalars = [self._write_quoted(text), [write_regex("true|false|null")]]
            keys = [[self._key]]
        else:
            keys = [[write_regex(r'"([^"\\\n]|\\.)*"')], [write_regex(r"'([^'\\\n]|\\.)*'")]]
            scalars = [*keys, [write_regex("True|False|None|true|false|null")]]
        value = self._lark.reserve_rule()
        comma = write_regex(", ?")
        member = join([self._lark.add_rule(*keys)], [write_regex(": ?")], [value])
        members = self._lark.repeat([*member, self._lark.repeat(join([comma], member), "*")], "?")
        values = self._lark.repeat([value, self._lark.repeat(join([comma], [value]), "*")], "?")
        opened = self._lark.add_rule(join([write_literal("{")], [members], [write_literal("}")]))
        listed = self._lark.add_rule(join([write_literal("[")], [values], [write_literal("]")]))
        self._lark.define_rule(value, *scalars, [write_regex(_NUMBER)], [opened], [listed])
        self._any = (value, opened)
        return self._any

    def _write_quoted(self, text: Symbol) -> Symbols:
        assert self._quote is not None
        end = self._lark.write_text(self._quote)
        return join(end, join([text], end))

    # Values under a schema.

    def _write_value(self, schema: object, root: Schema, depth: int) -> Symbols:
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return self._write_resolved(schema, root, depth)
        if reference not in self._targets:
            rule = self._targets[reference] = self._lark.reserve_rule()  # the schema may refer to itself
            self._lark.define_rule(rule, self._write_resolved(schema, root, depth))
        return [self._targets[reference]]

    def _write_resolved(self, schema: object, root: Schema, depth: int) -> Symbols:
        try:
            ways = self._write_ways(resolve_alone(schema, root), root, depth)
        except GrammarError:
            if self._quote is not None:
                raise
            return [self._add_json(schema if isinstance(schema, Mapping) else {}, root)]
        return ways[0] if len(ways) == 1 else [self._lark.add_rule(*ways)]

    def _write_ways(self, schema: object, root: Schema, depth: int) -> list[Symbols]:
        if schema is True or (isinstance(schema, Mapping) and KEYWORDS.isdisjoint(schema)):
            return [[self._write_any()[0]]]
        if depth > MAX_DEPTH:
            raise GrammarError(
                f"it holds more than {MAX_DEPTH} objects and lists inside each other",
                keyword=next((name for name in _NESTING if isinstance(schema, Mapping) and name in schema), None),
            )
        if isinstance(schema, Mapping) and (branches := list_alternatives(schema, root)):
            return [self._write_value(branch, root, depth) for branch in branches]
        found = split_schema(schema, root)
        ways = self._write_strings(found, root) if found.strings else []
        for other in found.others:
            ways += [self._write_part(part, other, root, depth) for part in list_parts(other, root)]
        if not ways:
            raise GrammarError(
                "no value is valid",
                keyword=next((name for name in _CHOOSING if isinstance(schema, Mapping) and name in schema), None),
            )
        return ways

    def _write_part(self, part: Schema, whole: Schema, root: Schema, depth: int) -> Symbols:
        """Write a value of one type other than string. whole: the schema that contains the part."""
        if part.keys() == {"const"}:
            value = part["const"]
            if isinstance(value, dict | list):
                raise GrammarError(CANNOT, keyword="enum" if "enum" in whole else "const")
            if self._constants and (value is None or isinstance(value, bool)):
                return [write_literal(_CONSTANTS[value])]
            return [write_literal(json.dumps(value))]
        types = set(find_types(part, root))
        if types == {"object"}:
            return self._write_object(part, root, depth)
        if types == {"array"}:
            return self._write_list(part, root, depth)
        if types & {"object", "array"}:
            raise GrammarError(CANNOT, keyword=next((name for name in ("oneOf", "enum") if name in part), "type"))
        if self._constants and part.get("type") == "null" and GENERAL.isdisjoint(part):
            return [write_literal("None")]
        if self._constants and part.get("type") == "boolean" and GENERAL.isdisjoint(part):
            return [write_regex("True|False")]
        return [self._add_json(part, root)]

    def _write_strings(self, found: SplitSchema, root: Schema) -> list[Symbols]:
        if self._quote is not None:
            return [self._write_quoted(write_strings(found, self._quote))]
        schema: Schema = found.strings[0] if len(found.strings) == 1 else {"anyOf": [*found.strings]}
        ways: list[Symbols] = [[self._add_json(schema, root)]]
        texts = [_write_in_single_quotes(one) for one in found.strings]
        if any(texts):
            expression = " | ".join(text for text in texts if text)
            ways.append([Symbol(f'''"'" ({expression}) "'"''', is_terminal=True)])
        return ways

    def _write_object(self, schema: Schema, root: Schema, depth: int) -> Symbols:
        if depth and is_any_object(schema):
            return [self._write_any()[1]]
        found = list_members(schema, root, self._codec if self._quote is not None else JsonCodec())
        others = schema.get("additionalProperties")
        if depth and not found and isinstance(others, Mapping):
            with located("additionalProperties"):
                other = self._write_item(others, root, depth)
            member = self._lark.add_rule(join([self._write_any_key()], [other]))
            more = self._lark.repeat(join([self._comma], [member]), "*")
            return join([write_literal("{")], [self._lark.repeat([member, more], "?")], [write_literal("}")])
        members: list[tuple[Symbols, bool]] = []
        for name, one, is_required in found:
            with located("properties", name):
                value = self._write_value(one, root, depth + 1)
            members.append((join([self._write_key(name)], value), is_required))
        return join([write_literal("{")], self._write_members(members), [write_literal("}")])

    def _write_key(self, name: str) -> Symbol:
        """Write the name of an object's member, and the separator between it and the value."""
        if self._quote is not None:
            return write_literal(f"{name}:")
        double = write_literal(json.dumps(name, ensure_ascii=False)).expression
        single = write_literal(f"'{_escape(name)}'").expression
        return Symbol(f"({double} | {single}) /: ?/", is_terminal=True)

    def _write_any_key(self) -> Symbol:
        if self._quote is not None:
            return Symbol(f'{self._key.expression} ":"', is_terminal=True)
        return write_regex(rf"""("([^"\\\x00-\x1f]|\\["\\nrtbf])*"|'{_IN_SINGLE_QUOTES}'): ?""")

    def _write_list(self, schema: Schema, root: Schema, depth: int) -> Symbols:
        first_schemas, item_schema, least, most = read_list(schema)
        items: list[Symbols] = []
        for index, one in enumerate(first_schemas):
            with located("prefixItems", str(index)):
                items.append([self._write_item(one, root, depth)])
        more: Symbols = []  # after `items`
        if most is None or most > len(items):
            with located("items"):
                item = self._write_item(item_schema, root, depth)
            items += [[item]] * (max(least, 1) - len(items))
            if most != len(items):
                suffix = "*" if most is None else f"{{0,{most - len(items)}}}"
                more = [self._lark.repeat(join([self._comma], [item]), suffix)]
        values: Symbols = more
        for index in range(len(items) - 1, -1, -1):
            values = join([self._comma] if index else [], items[index], values)
            if index >= least:
                values = [self._lark.repeat(values, "?")]
        return join([write_literal("[")], values, [write_literal("]")])

    def _write_item(self, schema: object, root: Schema, depth: int) -> Symbol:
        return self._lark.add_rule(self._write_value(schema, root, depth + 1))

    def _write_members(self, members: Sequence[tuple[Symbols, bool]]) -> Symbols:
        """Write members in order, each with whether it is required, with a comma between two."""
        after: Symbols = []  # follows if there has been a member
        first: Symbols = []  # follows if there has been none
        for items, is_required in reversed(members):
            following = join([self._comma], items, after)
            begun = join(items, after)
            after, first = (
                (following if is_required else [self._lark.add_rule(following, after)]),
                (begun if is_required else [self._lark.add_rule(begun, first)]),
            )
        return first


def _write_in_single_quotes(schema: Schema) -> str:
    """Return an expression for strings between single quotes; "" if only double quotes are possible."""
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        assert isinstance(values, list)
        return " | ".join(write_literal(_escape(str(value))).expression for value in values)
    if KEYWORDS.isdisjoint(schema.keys() - {"type"}):
        return write_regex(_IN_SINGLE_QUOTES).expression
    try:
        return rf"({write_string(schema, chr(39)).expression} & /[^\\\x00-\x1f]*/)"
    except GrammarError:
        return ""


def _escape(text: str) -> str:
    """Return a text as it is written between single quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'")
