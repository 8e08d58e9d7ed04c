"""The engine requests for chat requests with tools or reasoning: grammars of turns, and budgets of reasoning."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serve_llm.common.grammar import build_matcher
from serve_llm.common.options.limits import Limits
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import Sampling, ThinkingBudget
from serve_llm.server.dialects.dialect import write_dialect
from serve_llm.server.http.errors import InvalidRequest, Unsupported
from serve_llm.server.prompt.context import JobContext
from serve_llm.server.prompt.job_results import ValidGenerateRequest
from serve_llm.server.prompt.jobs import JOBS
from serve_llm.server.prompt.model import ServedModel
from serve_llm.server.prompt.pool import PromptPool, build_grammar_compiler
from support.fakes import make_model_info
from support.grammars import demo
from support.tools import DIALECT, TEMPLATE, TOOLS, WEATHER, with_tools, write_call

OSLO = write_call("get_weather", city="Oslo", days=2)
CLOCK = write_call("clock", zone="UTC")
NOW = write_call("clock")
BAD = write_call("get_weather", town="Oslo")
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
EOS = 1


@pytest.fixture(scope="module")
def context(model: ServedModel) -> JobContext:
    context = JobContext(with_tools(model), make_model_info(), Limits(), is_worker=True)
    return context._replace(grammars=build_grammar_compiler(context))


def run_job(context: JobContext, **body: Any) -> ValidGenerateRequest:
    content = json.dumps({"messages": [{"role": "user", "content": "hi"}]} | body).encode()
    done = JOBS["chat"](content, context)
    assert isinstance(done, ValidGenerateRequest)
    return done


def prepare(context: JobContext, **body: Any) -> Sampling:
    return run_job(context, **body).request.samplings[0]


def accepts(context: JobContext, grammar: str, text: str) -> bool:
    assert context.grammars is not None
    tokenizer = context.grammars.load_tokenizer()
    matcher = build_matcher(tokenizer, grammar)
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "items": {"const": 1}}}}
TURNS: list[tuple[dict[str, Any], list[str], list[str]]] = [  # body, allowed texts, other texts
    ({"tools": TOOLS}, ["Hello.", OSLO, f"So:\n{OSLO}\n{CLOCK}", f"<think>\nHm.\n</think>\n\n{OSLO}", BAD],
     ["<tool_call>\nOslo", OSLO.replace("get_weather", "go")]),
    ({"tools": TOOLS, "tool_choice": "required"},
     [OSLO, NOW, f"{OSLO}\n{NOW}", f"<think>\nHm.\n</think>\n\n{OSLO}"], ["Hello.", BAD, CLOCK]),
    ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, [OSLO], [f"{OSLO}\n{NOW}"]),
    ({"tools": TOOLS, "tool_choice": NAMED}, [OSLO], [CLOCK, BAD, "Hello."]),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
     [OSLO, "Hello."], [CLOCK]),
    ({"tools": [STRICT]}, [OSLO, "Hello."], [BAD]),
    ({"tools": TOOLS, "response_format": FORMAT}, ["[1]", OSLO, "<think>\nHm.\n</think>\n\n[1, 1]"], ["Hello.", "[2]"]),
    ({"response_format": FORMAT}, ["[1]", "<think>\nHm.\n</think>\n\n[1]"], ["Hello.", OSLO]),
    ({"response_format": FORMAT, "chat_template_kwargs": {"opens": True}}, ["Hm.\n</think>\n\n[1]"], ["[1]"]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "written", "refused"), TURNS, ids=lambda value: str(value)[:60])
def test_grammars(context: JobContext, body: dict[str, Any], written: list[str], refused: list[str]) -> None:
    grammar = prepare(context, **body).grammar
    assert {text: accepts(context, grammar, text) for text in written} == dict.fromkeys(written, True)
    assert {text: accepts(context, grammar, text) for text in refused} == dict.fromkeys(refused, False)


def test_nothing_to_enforce(context: JobContext) -> None:
    assert prepare(context).grammar == ""
    assert prepare(context, tools=TOOLS, tool_choice="none").grammar == ""


def test_the_end_of_the_text_is_no_part_of_the_reasoning(context: JobContext) -> None:
    """Otherwise a model could end its turn there, without the required call."""
    body: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "chat_template_kwargs": {"opens": True}}
    assert context.grammars is not None
    matcher = build_matcher(context.grammars.load_tokenizer(), prepare(context, **body).grammar)
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert mask >> 300 & 1 and not mask >> EOS & 1


def test_tokens_that_end_a_turn_stop_it_and_are_in_no_free_text(context: JobContext) -> None:
    """The checkpoint's own list of end ids may lack them. Completions use that list alone."""
    added = context.model.tokenizer.added_tokens
    dialect = msgspec.structs.replace(DIALECT, ends=("<|user|>", "<|end|>", "no token"))
    changed = context._replace(model=replace(context.model, dialect=dialect))
    changed = changed._replace(grammars=build_grammar_compiler(changed))
    for body in ({}, {"tools": TOOLS}):
        assert prepare(changed, **body).stop_token_ids == (0, EOS, added["<|user|>"])
        assert prepare(context, **body).stop_token_ids == (0, EOS)
    assert prepare(changed, ignore_eos=True).stop_token_ids == ()
    completion = JOBS["completion"](b'{"prompt": "x"}', changed)
    assert isinstance(completion, ValidGenerateRequest) and completion.request.samplings[0].stop_token_ids == (0, EOS)
    grammar = prepare(changed, tools=TOOLS, chat_template_kwargs={"opens": True}).grammar
    assert changed.grammars is not None
    matcher = build_matcher(changed.grammars.load_tokenizer(), grammar)
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    assert mask >> added["<|assistant|>"] & 1 and not mask >> added["<|user|>"] & 1


def test_refusals(context: JobContext) -> None:
    sets = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": sets}}
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    named = {"type": "function", "function": {"name": "f"}}
    bound = [
        {"tools": [WEATHER, strict]},
        {"tools": [WEATHER, tool], "tool_choice": "required"},
        {"tools": [WEATHER, tool], "tool_choice": named},
    ]
    for body in [*bound, *bound]:
        with pytest.raises(InvalidRequest, match="#/properties/a: uniqueItems") as caught:
            prepare(context, **body)
        assert caught.value.param == "tools[1].function.parameters"
    for choice in ("auto", NAMED):
        assert prepare(context, tools=[WEATHER, tool], tool_choice=choice).grammar, "its arguments are not bound"
    with pytest.raises(InvalidRequest) as caught:
        prepare(context, tools=TOOLS, ignore_eos=True)
    assert caught.value.param == "ignore_eos"


def test_the_budget_of_the_reasoning(context: JobContext, model: ServedModel) -> None:
    def encode(text: str) -> tuple[int, ...]:
        return tuple(model.tokenizer.encode(text, add_special_tokens=False))

    budget = ThinkingBudget(
        num_tokens=5,
        close_ids=encode("</think>"),
        open_ids=(encode("<think>"),),
        call_open_ids=(encode("<tool_call>"),),
        call_close_ids=(encode("</tool_call>"),),
    )
    assert prepare(context, thinking_token_budget=5).thinking == budget
    opened = prepare(context, thinking_token_budget=0, chat_template_kwargs={"opens": True}).thinking
    assert opened is not None and opened.is_open and opened.num_tokens == 0
    assert prepare(context, thinking_token_budget=-1).thinking is None
    with pytest.raises(Unsupported):
        prepare(context._replace(model=model), thinking_token_budget=5)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
    ],
)
def test_a_budget_in_the_form_of_another_api(
    context: JobContext, model: ServedModel, options: dict[str, Any], field: str
) -> None:
    """Gateways send it to every model, so a model that does not reason accepts it."""
    assert prepare(context, **options).thinking == prepare(context, thinking_token_budget=5).thinking
    done = run_job(context._replace(model=model), **options)
    assert done.ignored_fields == [field] and done.request.samplings[0].thinking is None


def test_a_worker_compiles_turns(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    (tmp_path / "dialect.json").write_text(write_dialect(DIALECT))
    options = make_options(
        "demo", chat_template=str(tmp_path / "template.jinja"), dialect=str(tmp_path / "dialect.json")
    )
    served = ServedModel.load(demo(), options)
    pool = PromptPool(JobContext(served, make_model_info(), options.limits), options)
    large = {**WEATHER["function"], "description": "x" * 10_000}
    try:
        for tools in ([WEATHER], [{"type": "function", "function": large}]):
            body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": "required"}
            content = json.dumps(body | {"truncate_prompt_tokens": 100}).encode()
            done = asyncio.run(pool.run("chat", content, ValidGenerateRequest)).request
            assert "get_weather" in done.samplings[0].grammar
            assert done.reply is not None and [tool.name for tool in done.reply.read_tools()] == ["get_weather"]
    finally:
        pool.close()
