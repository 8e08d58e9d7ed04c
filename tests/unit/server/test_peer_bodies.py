"""Requests as chat and completion clients send them: their bodies' fields, with shorter texts."""

from __future__ import annotations

from typing import Any

import pytest

from support.serving import Served

Json = dict[str, Any]
TALK: list[Json] = [{"role": "user", "content": "hi"}]
PARTS: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]

CHAT: dict[str, Json] = {
    "Open WebUI": {"stream": True, "messages": TALK, "stream_options": {"include_usage": True}},
    "Open WebUI with parameters": {
        "stream": True, "messages": TALK, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
        "frequency_penalty": 0.1, "presence_penalty": 0.1, "repeat_penalty": 1.1, "seed": 7, "stop": ["zz"],
        "max_tokens": 8, "reasoning_effort": "low", "num_ctx": 2048, "logit_bias": {},
    },
    "Open WebUI, title": {"messages": TALK, "stream": False, "max_completion_tokens": 8},
    "Continue": {
        "messages": TALK, "max_tokens": 8, "stream": True, "temperature": 0.5,
        "stream_options": {"include_usage": True},
    },
    "Cline": {
        "messages": PARTS, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8,
    },
    "Cline with an effort": {
        "messages": PARTS, "stream": True, "stream_options": {"include_usage": True}, "reasoning_effort": "medium",
        "max_tokens": 8,
    },
    "Roo": {
        "messages": [{"role": "system", "content": "Be brief."}, *TALK], "temperature": 0, "stream": True,
        "max_tokens": 8,
        "stream_options": {"include_usage": True}, "parallel_tool_calls": True,
    },
    "LibreChat": {"messages": TALK, "user": "64f", "stream": True, "max_tokens": 8},
    "claude-code-router": {"messages": TALK, "max_tokens": 8, "reasoning": {"effort": "high", "enabled": True}},
    "Cherry Studio": {"messages": TALK, "stream": True, "enable_thinking": False, "max_tokens": 8},
    "Dify, extended": {"messages": TALK, "thinking": {"type": "disabled"}, "enable_thinking": False, "max_tokens": 8},
}  # fmt: skip
COMPLETIONS: dict[str, Json] = {
    "Continue, autocomplete": {
        "prompt": "def f():\n", "max_tokens": 8, "temperature": 0.01, "stop": ["\n\n", "zz"], "stream": True,
    },
    "SGLang's benchmark": {
        "prompt": "x", "temperature": 0.0, "best_of": 1, "max_tokens": 8, "stream": True, "ignore_eos": True,
    },
    "lm-eval": {"prompt": [[40, 41]], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234, "temperature": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", CHAT)
def test_chat(served: Served, name: str) -> None:
    reply = served.chat(**{"model": "demo", "max_tokens": 8, **CHAT[name]})
    assert reply.status == 200, reply.content
    assert "x-ignored-fields" not in reply.headers


@pytest.mark.parametrize("name", COMPLETIONS)
def test_completions(served: Served, name: str) -> None:
    reply = served.complete(**{"model": "demo", **COMPLETIONS[name]})
    assert reply.status == 200, reply.content
    assert "x-ignored-fields" not in reply.headers
