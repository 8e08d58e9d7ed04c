"""Large bodies are encoded outside the event loop, so that streams go on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from serve_llm.server.response.builder import CompletionBuilder
from serve_llm.server.routes import generation
from serve_llm.server.schema.completions import Completion
from support.serving import TEXT, Served


@pytest.mark.parametrize("in_thread", [False, True])
def test_many_logprobs_are_encoded_outside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, in_thread: bool
) -> None:
    threads = []
    build = CompletionBuilder.build_body

    def note_thread(*args: Any) -> bytes:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            threads.append("event loop")
        return build(*args)

    monkeypatch.setattr(CompletionBuilder, "build_body", note_thread)
    monkeypatch.setattr(generation, "MAX_ENTRIES", 3 if in_thread else 4)
    ids = served.ids(TEXT)[:4]
    answer = served.complete(prompt=ids, prompt_logprobs=2, logprobs=1, max_tokens=1)
    found = Completion.model_validate(answer.json()).choices[0]
    assert len(found.prompt_logprobs or ()) == 4 and found.logprobs is not None
    assert threads == ([] if in_thread else ["event loop"])
