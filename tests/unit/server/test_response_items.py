"""Input items of POST /v1/responses that are left out or that only some clients send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
    return serve("Hello.<|end|>", served_model=with_tools(model), model_facts=None)


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


@pytest.mark.parametrize("kind", ["local_shell_call", "shell_call", "apply_patch_call"])
def test_items_of_hosted_tools_are_skipped_and_named(served: Served, kind: str) -> None:
    reply = ask(served, {"type": kind, "call_id": "1"}, {"type": f"{kind}_output", "call_id": "1"}, GO_ON)
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == "input[1], input[2]"


@pytest.mark.parametrize("encrypted", ["gAAAAABo_x-1==", "gAAAAABoAA==", "?"])
def test_reasoning_that_another_server_encrypted_is_skipped(served: Served, encrypted: str) -> None:
    """Clients send it back when they change the server in a conversation."""
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
