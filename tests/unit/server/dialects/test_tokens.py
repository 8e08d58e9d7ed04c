"""The tokens and logprobs of an answer are those that were generated, in every built-in dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from serve_llm.server.dialects.dialect import Dialect
from serve_llm.server.dialects.table import BUILT_IN
from serve_llm.server.prompt.model import ServedModel
from support.choices import fold, read_body
from support.dialects import FEW_DIALECTS, write_turn
from support.fakes import logprobs_of
from support.matrix import mostly_slow
from support.serving import Served
from support.tools import TOOLS, with_tools

CALLS = [("get_weather", {"city": "Oslo", "days": 2}), ("clock", {})]


def write_texts(dialect: Dialect) -> list[str]:
    """Return a whole turn, one that ends in a call, and one that only begins like a call."""
    reasoning = "" if dialect.reasoning is None else "Hm, Oslo."
    calls = [] if dialect.calls is None else CALLS
    whole = write_turn(dialect, reasoning=reasoning, content="I look.", calls=calls)
    return [
        whole,
        whole[: len(whole) * 4 // 5],
        write_turn(dialect, content="So: ") + write_turn(dialect, calls=calls)[:5],
    ]


@pytest.mark.parametrize("name", mostly_slow(BUILT_IN, FEW_DIALECTS))
def test_tokens_add_up(serve: Callable[..., Served], model: ServedModel, name: str) -> None:
    dialect = BUILT_IN[name]
    served_model = with_tools(model, dialect)
    body: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    if dialect.calls is not None:
        body["tools"] = TOOLS
    for text in write_texts(dialect):
        written = f"{text}<|end|>"
        served = serve(written, served_model=served_model, model_info=None, tokens_per_step=3)
        ids = served.ids(written)
        (end_id,) = served.ids("<|end|>")
        ids = ids[: ids.index(end_id) + 1]  # in harmony too, the engine takes this id for the end of the turn
        whole = served.chat(**body)
        streamed = served.chat(**body, stream=True, stream_options={"include_usage": True})
        usages = [whole.json()["usage"], streamed.events()[-1]["usage"]]
        choices = [read_body(whole), fold(streamed)]
        for choice, usage in zip(choices, usages, strict=True):
            assert choice["token_ids"] == ids
            entries = choice["logprobs"]["content"]
            assert [entry["logprob"] for entry in entries] == [logprobs_of(one, 1).logprob for one in ids]
            assert usage["completion_tokens"] == len(ids)
            num_reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
            assert num_reasoning <= len(ids) and (num_reasoning > 0) == ("reasoning" in choice["message"])
        messages = [choice["message"] for choice in choices]
        for call in messages[0].get("tool_calls", []) + messages[1].get("tool_calls", []):
            del call["id"]
        assert messages[0] == messages[1] and choices[0]["finish_reason"] == choices[1]["finish_reason"]
