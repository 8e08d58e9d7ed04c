"""Input items of POST /v1/responses that are skipped or that only some clients send."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import ResponseInputItem, Tool

from serve_llm.server.prompt.model import ServedModel
from support.asgi import Reply
from support.serving import Served
from support.tools import with_tools

Json = dict[str, Any]

HELLO: Json = {"role": "user", "content": "Hi"}
GO_ON: Json = {"role": "user", "content": "Go on"}
CUT: Json = {"type": "function_call", "status": "incomplete", "call_id": "1", "name": "f", "arguments": '{"city": "O'}


@pytest.fixture
def served(serve: Callable[..., Served], model: ServedModel) -> Served:
    return serve("Hello.<|end|>", served_model=with_tools(model), model_info=None)


def ask(served: Served, *items: Json) -> Reply:
    return served.post("/v1/responses", {"input": [HELLO, *items]})


def read_prompt(served: Served) -> str:
    return served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


def test_a_call_that_was_cut_is_left_out_with_its_output(served: Served) -> None:
    assert ask(served, GO_ON).status == 200
    expected = read_prompt(served)
    output = {"type": "function_call_output", "call_id": "1", "output": "aborted"}
    reply = ask(served, CUT, output, GO_ON)
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == "input[1], input[2]"
    assert read_prompt(served) == expected
    broken = ask(served, {**CUT, "status": "completed"}, GO_ON)
    assert broken.status == 400 and broken.json()["error"]["param"] == "input[1].arguments"  # type: ignore[index]


@pytest.mark.parametrize("cut", ["{", '{"city": "O', '{"city": "Oslo", "da', '{"days": 1.', '{"a": ["\\u00'])
def test_a_call_without_status_may_have_been_cut(served: Served, cut: str) -> None:
    """Clients that create their own items omit the status."""
    call = {name: value for name, value in CUT.items() if name != "status"} | {"arguments": cut}
    for status in ({}, {"status": None}, {"status": "in_progress"}):
        reply = ask(served, call | status, GO_ON)
        assert reply.status == 200, reply.content
        assert reply.headers["x-ignored-fields"] == "input[1]"


@pytest.mark.parametrize("broken", ["nothing", '{"a": 1} x', "[1", '"O', '{"a": nul}', "{1"])
def test_a_call_with_other_than_json_is_refused(served: Served, broken: str) -> None:
    call = {name: value for name, value in CUT.items() if name != "status"} | {"arguments": broken}
    assert ask(served, call, GO_ON).json()["error"]["param"] == "input[1].arguments"


@pytest.mark.parametrize("kind", ["local_shell_call", "shell_call", "apply_patch_call"])
def test_items_of_hosted_tools_are_skipped_and_named(served: Served, kind: str) -> None:
    reply = ask(served, {"type": kind, "call_id": "1"}, {"type": f"{kind}_output", "call_id": "1"}, GO_ON)
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == "input[1], input[2]"


@pytest.mark.parametrize("encrypted", ["gAAAAABo_x-1==", "gAAAAABoAA==", "?"])
def test_reasoning_that_another_server_encrypted_is_skipped(served: Served, encrypted: str) -> None:
    """Clients send it back when they change servers in a conversation."""
    assert ask(served, GO_ON).status == 200
    expected = read_prompt(served)
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": encrypted}
    reply = ask(served, reasoning, GO_ON)
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == "input[1].encrypted_content"
    assert read_prompt(served) == expected


def test_a_message_of_type_null(served: Served) -> None:
    assert ask(served, {**GO_ON, "type": None, "id": "msg_1"}).status == 200
    prompt = read_prompt(served)
    assert ask(served, GO_ON).status == 200 and read_prompt(served) == prompt


SUMMARY = [{"type": "summary_text", "text": "First."}, {"type": "summary_text", "text": "Then."}]


@pytest.mark.parametrize(
    ("reasoning", "text", "ignored"),
    [
        ({"summary": SUMMARY}, "First.\nThen.", None),
        ({"summary": SUMMARY, "content": []}, "First.\nThen.", None),
        ({"summary": SUMMARY, "encrypted_content": "gAAAAABo_x-1=="}, "First.\nThen.", "input[1].encrypted_content"),
        ({"summary": SUMMARY, "encrypted_content": "SG0u"}, "Hm.", None),
        ({"summary": SUMMARY, "content": [{"type": "reasoning_text", "text": "Hm."}]}, "Hm.", None),
    ],
    ids=range(5),
)
def test_reasoning_is_read_from_its_summary_last(
    served: Served, reasoning: Json, text: str, ignored: str | None
) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}
    reply = ask(served, {"type": "reasoning", "id": "rs_1", **reasoning}, call, result)
    assert reply.status == 200 and reply.headers.get("x-ignored-fields") == ignored
    assert f"<think>\n{text}\n</think>" in read_prompt(served)


@pytest.mark.parametrize("summary", ["x", [{"type": "summary_text"}], ["x"]])
def test_a_bad_summary_is_refused(served: Served, summary: object) -> None:
    reply = ask(served, {"type": "reasoning", "id": "rs_1", "summary": summary}, GO_ON)
    assert reply.status == 400 and reply.json()["error"]["param"].startswith("input[1].summary")


def _list_types(union: object) -> set[str]:
    """Return the types of the members of a union in the openai package."""
    members = typing.get_args(typing.get_args(union)[0])
    found = (re.findall(r"'([^']+)'", str(member.model_fields["type"].annotation)) for member in members)
    return {name for names in found for name in names}


def test_every_type_of_item_that_the_client_knows(served: Served) -> None:
    """Types that are not served are skipped and named."""
    known = _list_types(ResponseInputItem)
    assert len(known) > 25
    for kind in sorted(known - {"message", "item_reference", "reasoning"}):
        item = {"type": kind, "call_id": "1", "name": "f", "arguments": "{}", "input": "x", "output": "x"}
        reply = ask(served, item, GO_ON)
        assert reply.status == 200, reply.content
        is_served = kind.startswith(("function_call", "custom_tool_call"))
        assert reply.headers.get("x-ignored-fields") == (None if is_served else "input[1]")
    reply = ask(served, {"type": "compaction_summary", "encrypted_content": "x"}, GO_ON)
    assert reply.headers["x-ignored-fields"] == "input[1]"
    assert ask(served, {"type": "rocket"}, GO_ON).json()["error"]["code"] == "unsupported"


def test_every_type_of_tool_that_the_client_knows(served: Served) -> None:
    hosted = _list_types(Tool) - {"function", "custom", "namespace"} | {"computer-preview"}
    assert len(hosted) > 12
    for kind in sorted(hosted):
        reply = served.post("/v1/responses", {"input": "Hi", "tools": [{"type": kind}]})
        assert reply.status == 200 and reply.headers["x-ignored-fields"] == "tools[0]"


CLOCK: Json = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
SEARCH: Json = {"type": "web_search"}


@pytest.mark.parametrize(
    ("tools", "choice", "is_auto"),
    [
        ([SEARCH], "required", False),
        ([SEARCH], {"type": "web_search"}, False),
        ([SEARCH, CLOCK], {"type": "web_search_preview"}, True),
        ([CLOCK, SEARCH], {"type": "mcp", "server_label": "x"}, True),
        ([SEARCH, CLOCK], {"type": "allowed_tools", "mode": "required", "tools": [SEARCH]}, False),
    ],
    ids=str,
)
def test_a_choice_of_hosted_tools_is_skipped_with_them(
    served: Served, tools: list[Json], choice: object, is_auto: bool
) -> None:
    reply = served.post("/v1/responses", {"input": "Hi", "tools": tools, "tool_choice": choice})
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == f"tools[{tools.index(SEARCH)}], tool_choice"
    grammar = served.engine.submitted[-1].sampling.grammar
    auto = served.post("/v1/responses", {"input": "Hi", "tools": tools})
    assert auto.status == 200
    assert grammar == (served.engine.submitted[-1].sampling.grammar if is_auto else "")


def test_a_required_call_is_one_of_a_function(served: Served) -> None:
    body = {"input": "Hi", "tools": [SEARCH, CLOCK], "tool_choice": "required"}
    reply = served.post("/v1/responses", body)
    assert reply.headers["x-ignored-fields"] == "tools[0]"
    assert served.engine.submitted[-1].sampling.grammar
    unknown = {**body, "tools": [SEARCH], "tool_choice": {"type": "function", "name": "clock"}}
    assert "is not one of the tools" in served.post("/v1/responses", unknown).json()["error"]["message"]


@pytest.mark.parametrize(
    ("grammar", "is_exact"),
    [
        ('start: "(" start ")" | "a"', False),
        ('start: a\na: "x" b | "y"\nb: "(" a ")"', False),
        ('start: "a" start | "b"', True),
        ("start: A\nA: /a/ & /b/", False),
        ('start: "a"\n%ignore " "', True),
    ],
)
def test_a_grammar_that_is_not_enforced_as_it_is_is_named(served: Served, grammar: str, is_exact: bool) -> None:
    format = {"type": "grammar", "syntax": "lark", "definition": grammar}
    reply = served.post("/v1/responses", {"input": "Hi", "tools": [{"type": "custom", "name": "f", "format": format}]})
    assert reply.status == 200, reply.content
    assert reply.headers.get("x-ignored-fields") == (None if is_exact else "tools[0].format")


@pytest.mark.parametrize("status", ["incomplete", "in_progress"])
def test_an_incomplete_message_at_the_end_is_continued(served: Served, status: str) -> None:
    cut: Json = {"type": "message", "role": "assistant", "status": status, "content": "Hel"}
    cut["content"] = [{"type": "output_text", "text": "Hel"}]
    assert ask(served, cut).status == 200
    continued = read_prompt(served)
    chat = {"messages": [HELLO, {"role": "assistant", "content": "Hel"}], "continue_final_message": True}
    assert served.chat(**chat).status == 200
    assert continued == read_prompt(served) and continued.endswith("Hel")
    for items in ([{**cut, "status": "completed"}], [cut, GO_ON], [cut, {**CUT, "status": None, "arguments": "{}"}]):
        assert ask(served, *items).status == 200
        assert not read_prompt(served).endswith("Hel")


def test_the_request_may_choose_the_id(served: Served) -> None:
    for given in ("a-b_c", "resp_a-b_c"):
        reply = served.post("/v1/responses", {"input": "Hi", "request_id": given})
        assert reply.json()["id"] == "resp_a-b_c"  # type: ignore[index]
        assert "x-ignored-fields" not in reply.headers
    refused = served.post("/v1/responses", {"input": "Hi", "request_id": "a b"})
    assert refused.status == 400 and refused.json()["error"]["param"] == "request_id"  # type: ignore[index]
