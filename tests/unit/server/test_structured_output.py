"""Structured output: which requests are refused and by what name, and what reaches the engine for the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serve_llm.common.options.sources import make_options
from serve_llm.server.http.errors import InvalidRequest
from serve_llm.server.prompt.context import JobContext
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import PromptPool, PromptWorker
from serve_llm.server.prompt.text_jobs import TokenizeResult
from serve_llm.server.sampling_params import SamplingParams
from serve_llm.server.structured_output.checker import GrammarChecker
from serve_llm.server.structured_output.compiler import Grammar, GrammarCompiler, compute_key
from serve_llm.server.structured_output.params import StructuredOutputs
from support.fakes import make_model_info
from support.grammars import accepts, compile_grammar, demo
from support.matrix import mostly_slow
from support.serving import Served

Serve = Callable[..., Served]
TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler((demo() / "tokenizer.json").read_text, 4096, 2**20)


@pytest.fixture
def pool(model: ServedModel) -> Iterator[PromptPool]:
    options = make_options("demo", limit=("prompt-seconds=2",))
    made = PromptPool(JobContext(model, make_model_info(), options.limits), options)
    yield made
    made.close()


def refusal(compiler: GrammarCompiler, **wanted: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(StructuredOutputs(**wanted))
    return caught.value


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def nested_one_of(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        ways = [{"type": "object", "properties": {name: schema}, "required": [name]} for name in "ab"]
        schema = {"oneOf": ways}
    return schema


REFUSED: list[tuple[object, str, str]] = [  # schema, where, what
    ({"properties": {"a": {"items": {"not": {"format": "date"}}}}}, "#/properties/a/items: not:", "Unimplemented"),
    ({"if": {"format": "date"}, "then": {"minLength": 1}}, "json: if:", "Unimplemented"),
    ({"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]}, "#/anyOf/1: uniqueItems:", ""),
    ({"type": "array", "contains": {"type": "string"}}, "contains:", ""),
    ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "unevaluatedProperties": False}, "unevaluatedProperties:", ""),
    ({"type": "object", "propertyNames": {"maxLength": 3, "pattern": "a"}}, "propertyNames:", ""),
    ({"properties": {"a/b": {"type": "string", "format": "regex"}}}, "#/properties/a~1b: format:", "regex"),
    ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "#/properties/a: pattern:", "look-around"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum:", "greater than"),
    ({"properties": {"a": {"type": "object", "minProperties": 2}}}, "#/properties/a: minProperties:", "more than one"),
    ({"items": {"enum": [[1e400]]}}, "#/items: enum:", "beyond the range"),
    ({"type": "number", "multipleOf": 1e400}, "multipleOf:", "beyond the range"),
    ({"not": {"type": [{}]}}, "not:", "Unimplemented"),
    ({"not": {"type": "strin"}}, "not:", "Unimplemented"),
    ({"not": {"type": {"a": []}}}, "not:", "Unimplemented"),
    ({"$ref": "https://example.com/schema"}, "$ref:", "fetch"),
    ({"properties": {"a": {"$ref": "#/nowhere"}}}, "#/properties/a: $ref:", "/nowhere"),
    ({"$defs": {"x": {"type": "strin"}}, "properties": {"a": {"$ref": "#/$defs/x"}}}, "#/$defs/x: type:", "strin"),
    ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, "oneOf:", "coerce_one_of"),
    ({"properties": {"a": {"divisibleBy": 2}}}, "#/properties/a: divisibleBy:", "not supported"),
    (
        {"$ref": "#/components/A%20b/0", "components": {"A b": [{"properties": {"x": {"divisibleBy": 2}}}]}},
        "#/components/A b/0/properties/x: divisibleBy:",
        "not supported",
    ),
    (
        {
            "$defs": {"x": {"$id": "http://x/y", "parts": {"a": {"extends": {}}}}},
            "items": {"$ref": "http://x/y#/parts/a"},
        },
        "#/$defs/x/parts/a: extends:",
        "not supported",
    ),
    (
        {"$defs": {"x": {"$id": "http://x/y", "$ref": "#/parts/a", "parts": {"a": {"extends": {}}}}}},
        "#/$defs/x/parts/a: extends:",
        "not supported",
    ),
    (
        {
            "$defs": {"x": {"items": {"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}}},
            "properties": {"a": {"$ref": "#/$defs/x"}},
        },
        "#/$defs/x/items: oneOf:",
        "coerce_one_of",
    ),
    (
        {"$id": "http://x/y", "$defs": {"x": {"not": {"format": "date"}}}, "properties": {"a": {"$ref": "#/$defs/x"}}},
        "#/$defs/x: not:",
        "Unimplemented",
    ),
    (
        {
            "$defs": {"x": {"properties": {"a": {"allOf": [{"$ref": "#/$defs/x"}], "properties": {"b": {}}}}}},
            "$ref": "#/$defs/x",
        },
        "json: $ref:",
        "circular",
    ),
    ({"type": "object", "patternProperties": {"a": {}, "aa": {"type": "null"}}}, "patternProperties:", "disjoint"),
    (
        {"properties": {"description": {"type": "string", "pattern": "(?<=a)b"}}},
        "#/properties/description: pattern:",
        "",
    ),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 2}, "minProperties:", "required"),
    ({"const": 2**53 + 1}, "const:", "9007199254740993"),
    ({"items": {"enum": ["a", {"b": [-(2**53) - 1]}]}}, "#/items: enum:", "-9007199254740993"),
    ({"const": 2**64}, "const:", "rounding"),
    ({"type": "integer", "minimum": 2**53 + 1}, "minimum:", "2**53"),
    ({"type": "integer", "minimum": 0, "maximum": 2**60 + 1}, "maximum:", "2**53"),
    ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum:", "2**53"),
    ({"items": {"type": "integer", "exclusiveMaximum": 2**60}}, "#/items: exclusiveMaximum:", "2**53"),
    ({"type": "integer", "multipleOf": 2**53 + 1}, "multipleOf:", "too many digits"),
    ({"items": {"type": "string", "pattern": "^[+--]$"}}, "#/items: pattern:", "hyphens"),
    ({"type": "object", "patternProperties": {"[]a]": {}}}, "json: patternProperties:", "[]"),
    ({"enum": []}, "json", "empty"),
    (False, "json", "no value is valid"),
    ({"x-guidance": {"lenient": True}, "not": {"format": "date"}}, "not:", "Unimplemented"),
    ('{"type": ', "json", "malformed"),
    ("[1]", "json", "an object or a boolean"),
    (nested(1000), "json", "recursion"),
    (nested(70), "json", "inside each other"),
    (nested_one_of(6), "oneOf:", "coerce_one_of"),
]


@pytest.mark.parametrize(("schema", "place", "what"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_schema_that_cannot_be_enforced_is_refused_with_its_place(
    compiler: GrammarCompiler, schema: object, place: str, what: str
) -> None:
    error = refusal(compiler, json=schema)
    assert error.param == "structured_outputs.json"
    assert place in error.message and what in error.message, error.message


def test_other_kinds(compiler: GrammarCompiler) -> None:
    texts = ["a", 'b"\\\n', "\U0001f600", *(f"a{chr(code)}" for code in (*range(1, 32), 0x7F, 0x80, 0x9F, 0x2028))]
    choice = compile_grammar(choice=texts)
    assert all(accepts(choice, text) for text in texts)
    assert not accepts(choice, "b")
    regex = compile_grammar(regex="[0-9]+(/|x)")
    assert accepts(regex, "12/") and not accepts(regex, "12")
    attribute_in_text = compile_grammar(grammar='start: "a[max_tokens=1]" /[max_tokens=1]/  // [max_tokens=1]')
    assert accepts(attribute_in_text, "a[max_tokens=1]m")
    for grammar in ('root ::= "(" root ")" | "x"', 'start: "(" start ")" | "x"'):
        written = compile_grammar(grammar=grammar)
        assert accepts(written, "((x))") and not accepts(written, "((x)")
    for wanted, what in (
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)"}, "look-around"),
        ({"grammar": "hello"}, "neither Lark"),
        ({"grammar": "start: nowhere"}, "unknown name"),
        ({"grammar": "root ::= nowhere"}, "'nowhere' not found"),
        ({"grammar": 'start: x\nx: x "a"'}, "no text satisfies it"),
        ({"grammar": 'start: x\nx[max_tokens=5]: "a"+'}, "max_tokens"),
        ({"grammar": 'start: a "b"\na[capture="x", max_tokens=2]: /a*/'}, "max_tokens"),
        ({"grammar": 'start: a "b"\na[capture="[", temperature = 2.0]: /a*/'}, "temperature"),
        ({"grammar": 'start: %json {"x-guidance": {"lenient": true}, "not": {"format": "date"}}'}, "lenient"),
        ({"grammar": 'start: %json {"not": {"format": "date"}}'}, "not"),
        ({"grammar": 'start: "a" <|nowhere|>'}, "unknown special token"),
        ({"choice": ["x" * 2**20]}, "longer than"),
        ({"whitespace_pattern": "(", "json": {}}, "unclosed group"),
        ({"json": {"x-guidance": {"whitespace_pattern": " "}}, "disable_any_whitespace": True}, "x-guidance"),
        ({"json": {"x-guidance": {"whitespace_flexible": True}}, "whitespace_pattern": " ?"}, "x-guidance"),
    ):
        error = refusal(compiler, **wanted)
        assert error.param == f"structured_outputs.{next(iter(wanted))}" and what in error.message, error.message


def test_grammars_and_errors_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler((demo() / "tokenizer.json").read_text, 4096, 2**20)
    seen: list[str] = []
    check = GrammarChecker._find_error
    monkeypatch.setattr(GrammarChecker, "_find_error", lambda self, text: seen.append(text) or check(self, text))
    wanted = StructuredOutputs(regex="[a-z]")
    assert compiler.compile(wanted) == compiler.compile(StructuredOutputs(regex="[a-z]")) and len(seen) == 1
    messages = {refusal(compiler, regex="(").message for _ in range(3)}
    assert len(messages) == 1 and len(seen) == 2
    compiler.compile(StructuredOutputs(json={"properties": {"a": {}, "b": {}}}))
    compiler.compile(StructuredOutputs(json={"properties": {"b": {}, "a": {}}}))
    assert len(seen) == 4, "the order of properties is the order in which they are written"


def test_what_reaches_the_engine(serve: Serve) -> None:
    served = serve("{}")
    for _ in range(2):
        assert served.post("/v1/chat/completions", TALK | {"response_format": FORMAT, "n": 2}).status == 200
    assert served.post("/v1/chat/completions", TALK | {"response_format": {"type": "json_object"}}).status == 200
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
    assert served.post("/v1/chat/completions", TALK | {"response_format": tag}).status == 200
    assert served.complete(structured_outputs={"structural_tag": json.dumps(tag)}, max_tokens=2).status == 200
    assert served.complete(structured_outputs={"choice": ["a", "b"]}, max_tokens=2).status == 200
    assert served.complete(max_tokens=2).status == 200
    grammars = [request.sampling.grammar for request in served.engine.submitted]
    assert grammars == [compile_grammar(json=SCHEMA)] * 4 + [
        compile_grammar(json_object=True),
        *[compile_grammar(structural_tag=tag)] * 2,
        compile_grammar(choice=["a", "b"]),
        "",
    ]


def test_refusals_name_the_parameter(serve: Serve) -> None:
    served = serve()
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    body = TALK | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}}
    for _ in range(2):
        reply = served.post("/v1/chat/completions", body)
        error = reply.json()["error"]
        assert (reply.status, error["param"]) == (400, "response_format.json_schema.schema")
        assert "#/properties/a: uniqueItems" in error["message"]
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": 3}}
    error = served.post("/v1/chat/completions", TALK | {"response_format": tag}).json()["error"]
    assert error["param"] == "response_format" and "response_format at #/format: end: " in error["message"]
    reply = served.complete(structured_outputs={"json": bad | {"description": "x" * 20_000}})
    assert (reply.status, reply.json()["error"]["param"]) == (400, "structured_outputs.json"), "a large body"
    assert served.engine.submitted == []


BOMBS: list[dict[str, object]] = [
    {"regex": "(a{1000}){1000}{1000}"},
    {"json": nested_one_of(9)},
    {"json": nested(1000)},
    {"json": {"enum": [f"{number:050}" for number in range(200_000)]}},
    {"choice": [f"{number:06}" * 4 for number in range(400_000)]},
]


@pytest.mark.parametrize("bomb", mostly_slow(BOMBS, [BOMBS[0], BOMBS[2]]), ids=lambda value: str(value)[:30])
def test_a_bomb_ends_while_others_are_read(pool: PromptPool, bomb: dict[str, object]) -> None:
    body = json.dumps({"prompt": "x", "structured_outputs": bomb}).encode()
    ended: list[str] = []

    async def send(name: str, kind: str, content: bytes) -> None:
        try:
            await pool.run(kind, content, ValidGenerateRequest if kind == "completion" else TokenizeResult)
        except InvalidRequest:
            name = f"{name} refused"
        ended.append(name)

    async def run() -> float:
        await send("first", "tokenize", b'{"prompt": "' + b"x" * 9000 + b'"}')  # starts a worker
        began = time.perf_counter()
        bombing = asyncio.create_task(send("bomb", "completion", body))
        for number in range(3):
            await asyncio.sleep(0)
            await send(f"small {number}", "tokenize", b'{"prompt": "x"}')
        await bombing
        return time.perf_counter() - began

    spent = asyncio.run(run())
    assert sorted(ended) == ["bomb refused", "first", "small 0", "small 1", "small 2"]
    if not isinstance(bomb.get("json"), str):  # not refused at once
        assert ended[-1].startswith("bomb"), ended
    assert spent < 10.0, "far more than the limit of 2 s, for a busy machine"


@pytest.mark.parametrize("padding", [0, 9000], ids=["small body", "large body"])
def test_a_killed_compilation_names_its_parameter_and_is_not_tried_again(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, padding: int
) -> None:
    options = make_options("demo", limit=("prompt-seconds=0.4",))  # less than the grammar takes on any processor
    pool = PromptPool(JobContext(model, make_model_info(), options.limits), options)
    started: list[PromptWorker] = []
    start = PromptWorker.__init__

    def record(worker: PromptWorker, setup: Any) -> None:
        started.append(worker)
        start(worker, setup)

    monkeypatch.setattr(PromptWorker, "__init__", record)
    wanted = {"regex": "(a{1000}){1000}{1000}"}
    for extra in (0, 1):  # different bodies with the same grammar
        body = json.dumps({"prompt": "x", "structured_outputs": wanted}).encode() + b" " * (padding + extra)
        with pytest.raises(
            InvalidRequest, match=r"regex: it is too complex: compiling it took more than 0\.4 s"
        ) as caught:
            asyncio.run(pool.run("completion", body, ValidGenerateRequest))
        assert caught.value.param == "structured_outputs.regex"
    asyncio.run(pool.run("completion", b'{"prompt": "x"}', ValidGenerateRequest))
    assert len([worker for worker in started if not worker.is_usable]) == 1, "one worker was killed"
    pool.close()


def test_a_killed_compilation_of_a_part_names_the_part(model: ServedModel) -> None:
    options = make_options("demo", limit=("prompt-seconds=0.4",))
    pool = PromptPool(JobContext(model, make_model_info(), options.limits), options)
    wanted = {"json": {}, "whitespace_pattern": "(a{1000}){1000}{1000}"}
    body = json.dumps({"prompt": "x", "structured_outputs": wanted}).encode()
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            asyncio.run(pool.run("completion", body, ValidGenerateRequest))
        assert caught.value.param == "structured_outputs.whitespace_pattern"
        assert caught.value.message.startswith("structured_outputs.whitespace_pattern: it is too complex: compiling")
    pool.close()


def test_a_killed_compilation_of_a_schema_names_the_keyword(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = make_options("demo", limit=("prompt-seconds=0.4",))
    pool = PromptPool(JobContext(model, make_model_info(), options.limits), options)
    schema = {"type": "string", "pattern": "^(a{1000}){1000}{1000}$", "$defs": {"b": {}}}
    body = json.dumps({"prompt": "x", "structured_outputs": {"json": schema}}).encode()
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            asyncio.run(pool.run("completion", body, ValidGenerateRequest))
        assert caught.value.param == "structured_outputs.json"
        assert caught.value.message.startswith("structured_outputs.json: pattern: it is too complex: compiling it took")
    pool.close()


def test_a_worker_shares_its_grammars_with_the_server(pool: PromptPool) -> None:
    body = json.dumps({"prompt": "x", "structured_outputs": {"regex": "[a-z]"}}).encode() + b" " * 9000
    request = asyncio.run(pool.run("completion", body, ValidGenerateRequest)).request
    grammar = compile_grammar(regex="[a-z]")
    assert request.samplings[0].grammar == grammar
    assert pool.grammars.get(compute_key(StructuredOutputs(regex="[a-z]"))) == Grammar(grammar)


def test_a_worker_loads_the_tokenizer_when_a_grammar_needs_it() -> None:
    seen: list[str] = []

    class Host:
        def find(self, key: bytes, param: str) -> None:
            seen.append(f"find {param}")

        def begin(self, pointer: str, keyword: str | None) -> None:
            seen.append(f"begin {keyword}")

        def keep(self, key: bytes, grammar: Grammar) -> None:
            seen.append("keep")

        @contextlib.contextmanager
        def allow_loading(self) -> Iterator[None]:
            seen.append("load")
            yield

    compiler = GrammarCompiler((demo() / "tokenizer.json").read_text, 4096, 2**20, Host())
    assert seen == []
    for _ in range(2):
        compiler.compile(StructuredOutputs(regex="[a-z]"))
    refusal(compiler, regex="(")
    assert seen == ["load", *["find structured_outputs.regex", "begin None", "keep"] * 2], (
        "the time for loading is not the grammar's"
    )


def test_offline_parameters() -> None:
    with pytest.raises(ValueError, match="ignore_eos"):
        SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputs(regex="a"))
    with pytest.raises(ValueError, match="one of json, regex"):
        StructuredOutputs()
    with pytest.raises(ValueError, match="not json and json_object"):
        StructuredOutputs(json={}, json_object=True)
    with pytest.raises(ValueError, match="surrogate"):
        StructuredOutputs(choice=["\ud800"])
