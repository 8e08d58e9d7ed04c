"""Hostile structured output, tool lists and histories, in families like those of `support.hostile`.

The tool cases need a server with a dialect and a chat template that shows tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from support.hostile import CLIENT_ERROR, Case, chat, completion

Schema = dict[str, object]
OK = frozenset({200})
MAYBE = CLIENT_ERROR | {200}  # cheap enough to be served if the limits allow it


def grammar_cases() -> list[Case]:
    families = (schemas, schema_bombs, grammars, grammar_bombs, structural_tags, fields)
    return [case for family in families for case in family()]


def tool_cases() -> list[Case]:
    return [case for family in (tools, tool_choices, histories, odd_but_valid) for case in family()]


def constrained(name: str, **fields: object) -> Case:
    return completion(f"structured {name}", structured_outputs=fields)


def formatted(name: str, schema: object) -> Case:
    return chat(
        f"response_format {name}",
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )


def nested(depth: int, keyword: str = "properties") -> Schema:
    schema: Schema = {}
    for _ in range(depth):
        schema = {keyword: {"a": schema} if keyword == "properties" else [schema]}
    return schema


def alternatives(depth: int, keyword: str) -> Schema:
    """Return a grammar with two alternatives at each of a number of levels."""
    schema: Schema = {"type": "string"}
    for _ in range(depth):
        ways = [{"type": "object", "properties": {name: schema}, "required": [name]} for name in "ab"]
        schema = {keyword: ways}
    return schema


def schemas() -> Iterator[Case]:
    """Yield schemas that are unenforceable, contradictory, or malformed."""
    wrong: list[object] = [
        {"not": {"pattern": "^x+y"}},
        {"not": {"type": ["null", "boolean", "object", "array", "number", "string"]}},
        {"dependencies": {"a": 3}},
        {"oneOf": [{"required": ["a"]}, {"required": []}]},
        {"type": "array", "items": {"if": {"multipleOf": 2}, "then": {"minLength": 1}}},
        {"type": "array", "uniqueItems": True, "items": {"type": "array", "uniqueItems": True}},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "http://169.254.169.254/latest/meta-data/"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/nowhere"}}},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}], "minLength": 3}}, "$ref": "#/$defs/a"},
        {"type": "integer", "minimum": 10, "maximum": 9},
        {"type": "string", "minLength": 9, "maxLength": 3},
        {"type": "array", "minItems": 4, "maxItems": 1},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"enum": []},
        {"type": "sting"},
        {"type": 7},
        {"required": "name", "type": "object"},
        {"properties": [1, 2]},
        {"type": "string", "pattern": "(?<=a)b(?!c)"},
        {"type": "string", "pattern": r"(a)\1"},
        {"type": "string", "pattern": "["},
        {"type": "string", "format": 7},
        {"type": "string", "format": "regex"},
        {"type": "number", "multipleOf": -1},
        {"type": "number", "multipleOf": 1e-300, "minimum": 1e300},
        {"type": "string", "minLength": -5},
        {"type": "string", "maxLength": 10**30},
        {"x-guidance": {"lenient": True}, "not": {"format": "date"}},
        {"x-guidance": {"nonsense": 3}},
        {"properties": {"a": {"const": "\ud800"}}},
        {"oneOf": [{"type": "number"}, {"type": "integer"}]},
        False,
    ]
    for number, schema in enumerate(wrong):
        yield formatted(f"schema {number}", schema)
    for text in ("{", "[]", "3", '{"type": "string"', '{"a": NaN}', "\x00", "true false"):
        yield constrained(f"text {text!r}", json=text)


def schema_bombs() -> Iterator[Case]:
    yield constrained("depth 1,000", json='{"properties":{"a":' * 1000 + "{}" + "}}" * 1000)
    yield constrained("depth 90", json=nested(90))
    yield constrained("allOf in allOf", json=nested(90, "allOf"))._replace(statuses=MAYBE)
    yield constrained("oneOf, 2^9 ways", json=alternatives(9, "oneOf"))
    yield constrained("allOf of anyOf", json={"allOf": [alternatives(4, "anyOf"), *[alternatives(3, "anyOf")] * 8]})
    integers = [[{"properties": {f"p{i}": {"minimum": j, "type": "integer"}}} for j in range(9)] for i in range(9)]
    product = [{"anyOf": ways} for ways in integers]
    yield constrained("9^9 ways", json={"type": "object", "allOf": product})
    yield constrained("enum of 10 MB", json={"enum": [f"{number:050}" for number in range(200_000)]})
    yield constrained("properties", json={"properties": {str(i): {"pattern": "^[a-z]*$"} for i in range(9000)}})
    yield constrained("name of 900 KB", json={"required": ["x" * 900_000], "type": "object"})._replace(statuses=MAYBE)
    refs = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(7 * i + j) % 300}"} for j in range(12)]} for i in range(300)}
    yield constrained("references in circles", json={"$defs": refs, "$ref": "#/$defs/d0"})
    doubling = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    doubling["d60"] = {"allOf": [{"type": "string"}, {"not": {"format": "date"}}]}
    yield constrained("references that double", json={"$defs": doubling, "$ref": "#/$defs/d0"})
    yield constrained("number", json={"type": "number", "minimum": 1e-300, "maximum": 1e300, "multipleOf": 1e-200})
    names = {f"p{i}": [f"q{i}"] for i in range(40)}
    yield constrained("properties that need others", json={"type": "object", "dependentRequired": names})
    ways = [{"required": [f"p{i}"]} for i in range(2000)]
    yield constrained("one of 2,000 properties", json={"type": "object", "oneOf": ways})
    condition: Schema = {"type": "string"}
    either: Schema = {"type": "string"}
    for _ in range(6):
        condition = {
            "if": {"properties": {"a": condition}},
            "then": {"properties": {"b": condition}},
            "else": {"not": condition},
        }
        either = {"oneOf": [{"not": either}, {"properties": {"a": either}, "required": ["a"]}, {"required": ["b"]}]}
    yield constrained("conditions in conditions", json=condition)
    yield constrained("opposites of opposites", json=either)
    items = {"type": "array", "minItems": 10**9, "items": {"type": "null"}}
    yield constrained("items", json=items)._replace(statuses=MAYBE)


def grammars() -> Iterator[Case]:
    """Yield invalid regexes and grammars, and grammars without any text."""
    for regex in ("(", "[z-a]", "a{5,2}", "(?=a)", r"\1", "(?P<n>a)(?P=n)", "*", "\x00", r"\p{Nonsense}"):
        yield constrained(f"regex {regex!r}", regex=regex)
    for source in (
        "hello",
        "start: nowhere",
        "start: start",
        'start: "a" start',
        'start: "unclosed',
        "root ::= nowhere",
        "root ::= (",
        "start: <|nowhere|>",
        "start: <[99999999]>",
        "start: @other",
        'start: x\nx[max_tokens=1]: "a"',
        "start: %json {",
        'start: %json {"not": {"format": "date"}}',
        "%import common.NUMBER\nstart: NONSENSE",
        "start: /(/",
        "\x00",
        "{" * 1000,
    ):
        yield constrained(f"grammar {source[:30]!r}", grammar=source)


def grammar_bombs() -> Iterator[Case]:
    yield constrained("repetitions", regex="(a{1000}){1000}{1000}")
    yield constrained("nested stars", regex="(" * 200 + "a*" + ")*" * 200)._replace(statuses=MAYBE)
    yield constrained("counted sets", regex="(.*a.{40}){40}")._replace(statuses=MAYBE)
    yield constrained("rules that double", grammar="start: a0\n" + "\n".join(
        f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "x"')  # fmt: skip
    yield constrained("empty rules", grammar='start: x\nx: x x x | "" | "a" |')._replace(statuses=MAYBE)
    yield constrained("terminals", grammar="start: T\nT: " + " | ".join(f"/a.{{{i}}}b/" for i in range(900)))
    yield constrained("choices", choice=[f"{number:05}" * 4 for number in range(40_000)])._replace(statuses=MAYBE)
    yield constrained("a choice of 2 MB", choice=["x" * 2 * 2**20])
    yield constrained("whitespace", json={}, whitespace_pattern="( {1000}){1000}")._replace(statuses=MAYBE)


def structural_tags() -> Iterator[Case]:
    anything = {"type": "any_text"}
    deep: Schema = anything
    for _ in range(120):
        deep = {"type": "tag", "begin": "<", "content": deep, "end": ">"}
    content = {"type": "json_schema", "json_schema": {"not": {"format": "date"}}}
    many = [{"type": "tag", "begin": f"<{number}>", "content": content, "end": ""} for number in range(3000)]
    for number, format_ in enumerate(
        (
            None,
            {"type": "dispatch", "rules": []},
            {"type": "token", "token": "<|end|>"},
            {"type": "star", "content": anything},
            {"type": "repeat", "min": 0, "max": 10**9, "content": {"type": "const_string", "value": "x"}},
            {"type": "repeat", "min": 9999, "max": 10_000, "content": {"type": "regex", "pattern": "(a{99}){99}"}},
            {"type": "triggered_tags", "triggers": ["<"], "tags": many},
            {"type": "triggered_tags", "triggers": ["<"] * 5000, "tags": many[:1]},
            {"type": "or", "elements": [{"type": "regex", "pattern": "(?=a)"}] * 1000},
            deep,
        )
    ):
        yield constrained(f"structural tag {number}", structural_tag={"type": "structural_tag", "format": format_})
    yield constrained("structural tag text", structural_tag="[" * 10_000)


def fields() -> Iterator[Case]:
    """Yield meaningless combinations of fields."""
    yield completion("structured, two kinds", structured_outputs={"regex": "a", "json": {}})
    yield completion("structured, none", structured_outputs={})
    yield completion("structured, ignore_eos", structured_outputs={"regex": "a"}, ignore_eos=True)
    yield completion("structured, unknown", structured_outputs={"backend": "x"})
    yield completion("structured, many unknown", structured_outputs={f"f{number}": 1 for number in range(50_000)})
    yield chat("both fields", structured_outputs={"regex": "a"}, response_format={"type": "json_object"})


def function(name: object, **fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **fields}}


def tools() -> Iterator[Case]:
    many = [function(f"f{number}") for number in range(20_000)]
    wrong: list[object] = [
        {},
        "f",
        [None],
        [[]],
        [{}],
        [{"type": "function"}],
        [{"type": "web_search"}],
        [function("")],
        [function("f", parameters=3)],
        [function("f", parameters=True)],
        [function("get weather")],
        [function("wetter_für")],
        [function('f"')],
        [function("f", parameters={"type": "array"})],
        [function("f\x00")],
        [function("../../etc/passwd")],
        [function("x" * 10_000)],
        [function("f"), function("f")],
        [function("f", strict="yes")],
        many,
    ]
    for number, value in enumerate(wrong):
        yield chat(f"tools {number}", tools=value)
    bombs: list[Schema] = [
        {"not": {"format": "date"}},
        nested(90),
        alternatives(9, "oneOf"),
        {"$ref": "file:///etc/passwd"},
    ]
    for number, schema in enumerate(bombs):
        parameters = {"type": "object", "properties": {"a": schema}}
        case = chat(f"strict tool {number}", tools=[function("f", parameters=parameters, strict=True)])
        yield case._replace(statuses=MAYBE)


def tool_choices() -> Iterator[Case]:
    for number, choice in enumerate(
        (
            3,
            [],
            "always",
            {"type": "function"},
            {"type": "function", "function": {"name": "g"}},
            {"type": "allowed_tools"},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [function("f")]}},
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function("g")]}},
        )
    ):
        yield chat(f"tool_choice {number}", tools=[function("f")], tool_choice=choice)
    yield chat("tool_choice without tools", tool_choice="required")
    yield chat("tool_choice with an empty list of tools", tools=[], tool_choice="required")


def call(arguments: object, **fields: object) -> dict[str, object]:
    """Return an assistant message with one call of the tool f."""
    entry = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}} | fields
    return {"role": "assistant", "content": None, "tool_calls": [entry]}


def histories() -> Iterator[Case]:
    user = {"role": "user", "content": "x"}
    wrong: list[object] = [
        call("[1]"),
        call('{"a": NaN}'),
        call('{"a":' * 5000 + "1" + "}" * 5000),
        call("{}", function=None),
        {"role": "assistant", "tool_calls": "f"},
        {"role": "assistant", "tool_calls": [None]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1"}]},
    ]
    for number, message in enumerate(wrong):
        yield chat(f"history {number}", messages=[user, message, user], tools=[function("f")])
    yield chat("a truncated call", messages=[user, call("{"), user], tools=[function("f")])._replace(statuses=OK)
    parts = [call(json.dumps({"x": "y" * 1000}))] * 2000
    yield chat("a history of calls", messages=[user, *parts])


def odd_but_valid() -> Iterator[Case]:
    """Yield requests that clients send although no API documents them."""
    user = {"role": "user", "content": "x"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "r"}
    without_id = {"role": "tool", "content": "r"}
    empty = {"role": "assistant", "content": None}
    talks: list[list[Schema]] = [
        [user, call({"a": 1}), result],
        [user, call(None), result],
        [user, call(""), result],
        [user, call("{}"), without_id],
        [user, call("{}"), {**result, "tool_call_id": "other"}],
        [user, call("{}"), {**result, "content": None}],
        [user, call("{}", id=None), result],
        [user, call("{}", function={"name": "unlisted", "arguments": "{}"}), result],
        [user, empty, user],
        [user, {**empty, "content": "x", "tool_calls": []}, user],
        [user, {**empty, "refusal": "no"}, user],
        [result],
    ]
    for number, messages in enumerate(talks):
        yield chat(f"odd history {number}", messages=messages, tools=[function("f")])._replace(statuses=OK)
    parameters = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for number, tool in enumerate(
        (
            function("f", parameters=None),
            function("f", parameters={}),
            function("f", parameters=parameters),
            function("f", description=None, strict=None),
            function("x" * 128),
            {**function("f"), "cache_control": {"type": "ephemeral"}},
        )
    ):
        case = chat(f"odd tool {number}", tools=[tool], tool_choice="required", parallel_tool_calls=False)
        yield case._replace(statuses=OK)
