"""Documents and search results in /v1/messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.server.prompt.model import ServedModel
from support.asgi import Reply
from support.serving import Served
from support.tools import with_tools

Json = dict[str, Any]

PLAIN: Json = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "One."}}
PARTS = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Two."}]}}
RESULT = {"type": "search_result", "title": "T", "source": "http://s", "content": [{"type": "text", "text": "Three."}]}


@pytest.fixture
def served(serve: Callable[..., Served], model: ServedModel) -> Served:
    return serve("Hello.<|end|>", served_model=with_tools(model), model_info=None)


def ask(served: Served, *blocks: Json) -> Reply:
    return served.post("/v1/messages", {"max_tokens": 20, "messages": [{"role": "user", "content": list(blocks)}]})


def read_prompt(served: Served) -> str:
    return served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


def test_their_texts_reach_the_model(served: Served) -> None:
    titled = {**PLAIN, "title": "Title", "context": "Context", "citations": {"enabled": True}}
    reply = ask(served, titled, PARTS, RESULT, {"type": "text", "text": "Which?"})
    assert reply.status == 200, reply.content
    assert reply.headers["x-ignored-fields"] == "messages[0].content[0].citations"
    expected = "Title\nContext\nOne.\nTwo.\nT\nhttp://s\nThree.\nWhich?"
    assert f"<|user|>\n{expected}<|end|>" in read_prompt(served)


def test_in_results_of_tools(served: Served) -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "Zero."}, PLAIN, RESULT]}
    reply = ask(served, result)
    assert reply.status == 200 and "x-ignored-fields" not in reply.headers
    assert "<|tool|>\nZero.\nOne.\nT\nhttp://s\nThree.<|end|>" in read_prompt(served)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({"type": "document"}, "messages[0].content[0].source must be an object"),
        ({"type": "document", "source": {"type": "base64", "data": "x"}}, "sources of type 'base64' are not supported"),
        ({"type": "document", "source": {"type": []}}, "sources of type [] are not supported"),
        ({"type": "document", "source": {"type": "text"}}, "source.data must be a string"),
        ({"type": "document", "source": {"type": "content", "content": [3]}}, "source.content[0]"),
        ({**PLAIN, "title": 3}, "messages[0].content[0].title must be a string"),
        ({"type": "search_result", "title": "T", "source": "S"}, "messages[0].content[0].content"),
        ({**RESULT, "content": [{"type": "image"}]}, "blocks of type 'image'"),
    ],
    ids=range(8),
)
def test_what_cannot_be_read_is_named(served: Served, block: Json, problem: str) -> None:
    reply = ask(served, block)
    assert reply.status == 400 and problem in reply.json()["error"]["message"], reply.content  # type: ignore[index]
