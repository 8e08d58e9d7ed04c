"""Hostile requests to /v1/messages and /v1/responses, and custom tools of chat, in families like those of
`support.hostile`.

They need a server with a dialect and a chat template that shows tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from support.hostile import MANY, Case
from support.hostile_grammars import MAYBE, Schema, alternatives, nested

MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
Json = dict[str, object]
ENDLESS: Schema = {"type": "array", "uniqueItems": True}


def agent_cases() -> list[Case]:
    families = (messages, blocks, client_tools, responses, items, flat_tools, custom_tools, counts, compactions)
    return [case for family in families for case in family()]


def ask(name: object, **fields: object) -> Case:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} | fields
    return Case(f"{MESSAGES} {name}", MESSAGES, json.dumps(body).encode())


def respond(name: object, **fields: object) -> Case:
    body = {"input": "x", "max_output_tokens": 1} | fields
    return Case(f"{RESPONSES} {name}", RESPONSES, json.dumps(body).encode())


def messages() -> Iterator[Case]:
    wrong: list[Json] = [
        {"max_tokens": value} for value in (None, -1, "9", 1.5, True)
    ] + [
        {"messages": value} for value in (None, {}, "x", [3], [[]], [{"role": "wizard", "content": "x"}], [{}])
    ]  # fmt: skip
    wrong += [{"system": value} for value in (3, [3], [{"type": "image"}], [{"type": []}], {"type": "text"})]
    wrong += [{"stop_sequences": value} for value in ("x", [3], [""], ["x" * 10_000], ["x"] * MANY)]
    wrong += [{"thinking": value} for value in ("on", {"type": []}, {"type": "enabled", "budget_tokens": 2**70})]
    wrong += [{"temperature": "hot"}, {"top_k": 1.5}, {"top_p": -1}, {"stream": "yes"}, {"model": ["x"]}]
    wrong += [
        {"output_config": {"format": {"type": "json_schema", "schema": value}}} for value in (ENDLESS, nested(90))
    ]
    wrong += [{"output_format": {"type": "json_schema", "schema": value}} for value in (3, ENDLESS)]
    for number, fields in enumerate(wrong):
        yield ask(number, **fields)
    yield ask("messages", messages=[{"role": "user", "content": "x"}] * MANY)
    unknown = {f"field {number}\r\nX-Injected: 1": number for number in range(MANY)}
    yield ask("unknown fields", **unknown)._replace(statuses=MAYBE)
    for number, body in enumerate((b"", b"[]", b'{"messages": [{"role": "user", "content": "\xff"}]}', b"{" * 1000)):
        yield Case(f"{MESSAGES} malformed {number}", MESSAGES, body)


def blocks() -> Iterator[Case]:
    call: Json = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    wrong: list[tuple[str, object]] = [
        ("user", block)
        for block in (
            None,
            [],
            {},
            {"type": None},
            {"type": []},
            {"type": {}},
            {"type": "text"},
            {"type": "text", "text": 3},
            {"type": "text", "text": ["x"]},
            {"type": "thinking", "thinking": "x"},
            {"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}},
            {"type": "document", "source": {"type": "url", "url": "http://169.254.169.254/"}},
            {"type": "tool_result"},
            {"type": "tool_result", "tool_use_id": ["a"]},
            {"type": "tool_result", "tool_use_id": "a", "content": 3},
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": []}]},
            {"type": "tool_result", "tool_use_id": "a", "content": [[]]},
            call,
        )
    ]
    wrong += [
        ("assistant", {**call, **changed})
        for changed in ({"input": 3}, {"input": "{}"}, {"id": None}, {"id": {}}, {"name": 3}, {"input": [nested(9)]})
    ]
    wrong.append(("assistant", {"type": "thinking", "thinking": 5}))
    for number, (role, block) in enumerate(wrong):
        talk = [{"role": "user", "content": "x"}, {"role": role, "content": [block]}, {"role": "user", "content": "y"}]
        yield ask(f"block {number}", messages=talk)
    deep = '{"a":' * 4000 + "1" + "}" * 4000
    text = json.dumps(
        ask("", messages=[{"role": "assistant", "content": [{**call, "input": "deep"}]}] * 2).body.decode()
    )
    yield Case(f"{MESSAGES} deep input", MESSAGES, json.loads(text).replace('"deep"', deep).encode())
    results = [{"type": "tool_result", "tool_use_id": f"t{number}", "content": "x"} for number in range(MANY)]
    yield ask("results", messages=[{"role": "user", "content": results}])
    texts = [{"type": "text", "text": "x"}] * (4 * MANY)
    yield ask("texts", messages=[{"role": "user", "content": texts}])


def client_tools() -> Iterator[Case]:
    good: Json = {"name": "f", "input_schema": {"type": "object"}}
    wrong: list[object] = [
        "f",
        [None],
        [{}],
        [{"name": "f"}],
        [{**good, "name": "../f"}],
        [{**good, "input_schema": {"type": "array"}}],
        [{**good, "type": "rocket"}],
        [{**good, "type": "tool_search_tool" + "w" * MANY + "!"}],
        [{**good, "strict": "yes"}],
        [good, good],
        [{**good, "name": f"f{number}"} for number in range(20_000)],
        [{**good, "strict": True, "input_schema": {"properties": {"a": ENDLESS}}}],
        [{**good, "strict": True, "input_schema": {"properties": {"a": alternatives(9, "oneOf")}}}],
    ]
    for number, value in enumerate(wrong):
        yield ask(f"tools {number}", tools=value)
    bad_choices = ("any", {"type": "all"}, {"type": "tool"}, {"type": "tool", "name": "g"}, {"type": []}, [])
    for number, choice in enumerate(bad_choices):
        yield ask(f"tool_choice {number}", tools=[good], tool_choice=choice)
    yield ask("required, not enforceable", tools=[{**good, "input_schema": {"properties": {"a": ENDLESS}}}],
              tool_choice={"type": "any"})  # fmt: skip


def responses() -> Iterator[Case]:
    wrong: list[Json] = [{"input": value} for value in (None, 3, {}, [], [3], [[]], [None])]
    wrong += [{"max_output_tokens": value} for value in (0, -1, "9", 1.5, 2**70)]
    wrong += [{"instructions": 3}, {"instructions": ["x"]}, {"background": True, "store": False}, {"top_logprobs": 5}]
    wrong += [{"previous_response_id": "x" * MANY}, {"truncation": "middle"}, {"include": "all"}, {"metadata": [1]}]
    wrong += [{"reasoning": {"effort": "endless"}}, {"reasoning": 3}, {"text": 3}, {"text": {"format": {"type": []}}}]
    for schema in (3, ENDLESS, nested(90), alternatives(9, "oneOf")):
        wrong.append({"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}})
    for number, fields in enumerate(wrong):
        yield respond(number, **fields)
    unknown = {f"field {number}\r\nX-Injected: 1": number for number in range(MANY)}
    yield respond("unknown fields", **unknown)._replace(statuses=MAYBE)
    yield respond("metadata", metadata={"a": nested(60), "b": "x" * 10**6})._replace(statuses=MAYBE)
    for number, body in enumerate((b"", b"[]", b'{"input": NaN}', b'{"input": "\\ud800"}', b'{"input":' + b"[" * 9000)):
        yield Case(f"{RESPONSES} malformed {number}", RESPONSES, body)


def items() -> Iterator[Case]:
    call: Json = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    wrong: list[Json] = [
        {**call, "arguments": text} for text in ("{]", "[1]", "[1", '{"a": NaN}', "1" * 5000, 3, [], '{"a":' * 5000)
    ]
    wrong += [{**call, "call_id": 3}, {**call, "name": {}}, {**call, "name": None}]
    wrong += [
        {"type": kind} for kind in ([], {}, 3, "", "rocket", "x" * MANY, "item_reference", "function_call_output")
    ]
    wrong += [{"role": role, "content": "x"} for role in ([], {}, 3, None, "tool", "wizard")]
    for content in (3, {}, [3], [[]], [{"type": []}], [{"type": {}}], [{"type": "input_text", "text": 3}]):
        wrong.append({"role": "user", "content": content})
    wrong += [
        {"type": "function_call_output", "call_id": "a", "output": value} for value in (3, {}, [3], [{"type": []}])
    ]
    wrong += [{"type": "reasoning", "content": 3}, {"type": "reasoning", "content": [3]}]
    wrong += [{"type": "custom_tool_call", "call_id": "a", "name": "f", "input": {"a": 1}}]
    for number, item in enumerate(wrong):
        yield respond(f"item {number}", input=[{"role": "user", "content": "x"}, item])
    for number, text in enumerate(("?", "/w==", "x" * MANY)):
        reasoning = {"type": "reasoning", "encrypted_content": text}
        case = respond(f"encrypted {number}", input=[{"role": "user", "content": "x"}, reasoning])
        yield case._replace(statuses=frozenset({200}))
    for number, text in enumerate(("{" + '"a": [' * 90, '{"' + "x" * 10**6)):
        case = respond(f"cut {number}", input=[{"role": "user", "content": "x"}, {**call, "arguments": text}])
        yield case._replace(statuses=MAYBE)
    yield respond("summary", input=[{"type": "reasoning", "summary": [{"type": "summary_text", "text": 3}] * MANY}])
    yield respond("items", input=[call] * MANY)
    parts = [{"type": "input_text", "text": "x"}] * (4 * MANY)
    yield respond("parts", input=[{"role": "user", "content": parts}])
    yield respond("only hosted items", input=[{"type": "web_search_call"}] * 9000)


def flat_tools() -> Iterator[Case]:
    good: Json = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    custom: Json = {"type": "custom", "name": "f"}
    wrong: list[object] = [
        "f",
        [None],
        [{}],
        [{"type": []}],
        [{"type": "x" * MANY}],
        [{"type": "function"}],
        [{**good, "parameters": []}],
        [{**good, "name": "f\x00"}],
        [good, {**custom}],
        [{**good, "name": f"f{number}"} for number in range(20_000)],
        [{**good, "strict": True, "parameters": {"properties": {"a": ENDLESS}}}],
        [{**custom, "format": {"type": "grammar", "syntax": "regex"}}],
        [{**custom, "format": {"type": "grammar", "syntax": "regex", "definition": "(?=a)"}}],
        [{**custom, "format": {"type": "grammar", "syntax": "regex", "definition": "(a{1000}){1000}{1000}"}}],
        [{"type": "namespace", "tools": [good]}],
        [{"type": "namespace", "name": "x" * MANY, "tools": [good]}],
        [{"type": "namespace", "name": "n", "tools": {}}],
        [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m", "tools": [good]}]}],
        [{"type": "namespace", "name": "n", "tools": [{**good, "name": f"f{number}"} for number in range(20_000)]}],
        [{**good, "name": "n__f"}, {"type": "namespace", "name": "n", "tools": [good]}],
    ]
    wrong += [
        [{**custom, "format": {"type": "grammar", "syntax": "lark", "definition": text}}]
        for text in ("", "start: start", "start: /[/", "start: /(a{1000}){1000}{1000}/", 'start: "\x00')
    ]
    for number, value in enumerate(wrong):
        yield respond(f"tools {number}", tools=value)
    bad_choices: tuple[object, ...] = (
        3,
        "always",
        {"type": []},
        {"type": "function"},
        {"type": "function", "name": "g"},
        {"type": "web_search"},
        {"type": "allowed_tools", "mode": "required", "tools": []},
        {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}] * MANY},
        {"type": "allowed_tools", "tools": [{"type": "namespace", "name": "n"}] * MANY},
        {"type": "function", "namespace": 3, "name": "f"},
    )
    for number, choice in enumerate(bad_choices):
        yield respond(f"tool_choice {number}", tools=[good], tool_choice=choice)


def custom_tools() -> Iterator[Case]:
    """Yield custom tools of chat completions, with grammars that would be infinite or huge when expanded."""
    names = [f"n{number}" for number in range(40)]
    definitions = [
        "",
        "start: start",
        'start: a\na: "(" b\nb: a ")"',
        "start: " + "(" * 5000 + '"a"' + ")" * 5000,
        "start: n0\n" + "\n".join(f"{name}: {' | '.join(names)}" for name in names),
        "start: n0\n" + "\n".join(f"n{n}: n{n + 1} n{n + 1}" for n in range(60)) + '\nn60: "x"',
        'start: "a"~1..1000000000',
        "start: /(a{1000}){1000}{1000}/",
        "start: /[/",
        'start: "\x00" /\ud800/',
    ]
    formats: list[object] = [{"type": []}, {"type": "grammar", "grammar": []}, {"type": "grammar", "grammar": {}}]
    for syntax in ("lark", "regex"):
        formats += [{"type": "grammar", "grammar": {"syntax": syntax, "definition": text}} for text in definitions]
    for number, format in enumerate(formats):
        tool = {"type": "custom", "custom": {"name": "f", "format": format}}
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [tool]}
        yield Case(f"{CHAT} custom {number}", CHAT, json.dumps(body).encode(), statuses=MAYBE)


def counts() -> Iterator[Case]:
    """Yield requests to the routes that only count tokens."""
    for number, body in enumerate(({}, {"messages": []}, {"messages": [{"role": "user", "content": [{"type": []}]}]})):
        yield Case(f"count_tokens {number}", f"{MESSAGES}/count_tokens", json.dumps(body).encode())
    for number, body in enumerate(({}, {"input": []}, {"input": [{"type": []}]})):
        yield Case(f"input_tokens {number}", f"{RESPONSES}/input_tokens", json.dumps(body).encode())


def compactions() -> Iterator[Case]:
    path = f"{RESPONSES}/compact"
    wrong: list[Json] = [{"input": value} for value in (None, [], 3, {}, [3], [{"type": []}], [{"role": "wizard"}])]
    wrong += [{"instructions": 3}, {"previous_response_id": "x"}, {"model": "x" * MANY}, {"tools": [{}]}]
    wrong += [{"input": [{"role": "user", "content": "x"}] * MANY}, {"input": "word " * MANY}]
    for number, fields in enumerate(wrong):
        yield Case(f"{path} {number}", path, json.dumps({"input": "x"} | fields).encode())
    for number, body in enumerate((b"", b"[]", b'{"input": "\xff"}', b"{" * 1000)):
        yield Case(f"{path} malformed {number}", path, body)
    for value in (None, 3, [], "x", "AA==", "/w==", "x" * MANY):
        summary = {"type": "compaction", "encrypted_content": value}
        yield respond(f"compaction {str(value)[:9]}", input=[summary, {"type": "compaction_trigger"}, {"type": "x"}])
