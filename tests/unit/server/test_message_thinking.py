"""Thinking in POST /v1/messages: when it is requested from the model, and what the client gets, on a scripted
engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.common.options.sources import make_options
from serve_llm.server.prompt.model import ServedModel
from support.agent_events import fold_message, read_events, strip_message
from support.serving import Served
from support.tools import with_tools

Serve = Callable[..., Served]
Json = dict[str, Any]
WRITTEN = "<think>\nHm, a < b.\n</think>\n\nYes.<|end|>"
OMITTED: Json = {"type": "adaptive", "display": "omitted"}


@pytest.fixture
def served(serve: Serve, model: ServedModel) -> Served:
    return serve(WRITTEN, served_model=with_tools(model), model_info=None)


def ask(served: Served, **fields: Any) -> Json:
    body = {"max_tokens": 300, "messages": [{"role": "user", "content": "Hello"}], **fields}
    whole = served.post("/v1/messages", body)
    assert whole.status == 200, whole.content
    events = read_events(served.post("/v1/messages", body | {"stream": True}).content)
    assert strip_message(fold_message(events)) == strip_message(whole.json())
    return dict(whole.json())


def prompt_text(served: Served) -> str:
    return served.model.tokenizer.decode(served.engine.submitted[-1].prompt_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "-/False/False"),
        ({"thinking": {"type": "disabled"}}, "none/False/False"),
        ({"thinking": {"type": "between_tools"}}, "none/False/False"),
        ({"thinking": {"type": "adaptive"}}, "-/-/-"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "-/True/True"),
        ({"output_config": {"effort": "low"}}, "low/False/False"),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}, "low/True/True"),
    ],
    ids=str,
)
def test_what_the_template_gets(model: ServedModel, serve: Serve, fields: Json, shown: str) -> None:
    source = "{{ reasoning_effort or '-' }}/{{ enable_thinking | default('-') }}/{{ thinking | default('-') }}"
    served = serve(served_model=ServedModel.load(model.directory, make_options("demo", chat_template=source)))
    ask(served, **fields)
    assert prompt_text(served) == shown


def test_thinking_is_shown_where_it_is_asked_for(served: Served, serve: Serve) -> None:
    for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 99}):
        content = ask(served, thinking=thinking)["content"]
        assert [block["type"] for block in content] == ["thinking", "text"]
    for thinking in (None, {"type": "disabled"}, {"type": "between_tools"}):
        assert ask(served, thinking=thinking)["content"] == [{"type": "text", "text": "Yes."}]
        budget = served.engine.submitted[-1].sampling.thinking
        assert budget is not None and budget.num_tokens == 0, "thinking would cost tokens that nobody sees"
    reply = serve("Yes.<|end|>").post("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]})
    assert reply.status == 200 and "x-ignored-fields" not in reply.headers, "a model without reasoning"


def test_omitted_thinking_reaches_the_model_again(served: Served) -> None:
    block, text = ask(served, thinking=OMITTED)["content"]
    assert block["type"] == "thinking" and block["thinking"] == "" and block["signature"]
    assert text == {"type": "text", "text": "Yes."}
    body = {"max_tokens": 300, "messages": [{"role": "user", "content": "Hello"}], "thinking": OMITTED, "stream": True}
    events = read_events(served.post("/v1/messages", body).content)
    assert "thinking_delta" not in [event.get("delta", {}).get("type") for event in events]
    use = {"type": "tool_use", "id": "c", "name": "clock", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "12:30"}]}
    for sent in (block, {"type": "thinking", "thinking": "Hm, a < b.", "signature": ""}):
        ask(served, messages=[{"role": "assistant", "content": [sent, use]}, result])
        assert "<think>\nHm, a < b.\n</think>" in prompt_text(served)
    for signature in ("EqoBCkgIARABGAIiQL", "omitted.?", "omitted.", None):
        foreign = {"type": "thinking", "thinking": "", "signature": signature}
        ask(served, messages=[{"role": "assistant", "content": [foreign, use]}, result])
        assert "Hm" not in prompt_text(served)
