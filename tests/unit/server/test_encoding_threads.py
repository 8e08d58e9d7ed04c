"""Large bodies are encoded outside the event loop, so that streams go on."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from serve_llm.server.generate.delta import Delta, TokenCounts
from serve_llm.server.response.builder import CompletionBuilder
from serve_llm.server.response.sse import SSEEncoder
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


def join(events: list[Any]) -> tuple[str, list[float], object]:
    """The text, log-probabilities and prompt of a stream, however its tokens are grouped."""
    choices = [choice for event in events for choice in event["choices"]]
    logprobs = [one for choice in choices for one in (choice["logprobs"] or {"token_logprobs": ()})["token_logprobs"]]
    return "".join(choice["text"] for choice in choices), logprobs, choices[0].get("prompt_logprobs")


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("form", [{"prompt_logprobs": 2}, {"echo": True, "logprobs": 2}], ids=["prompt", "echo"])
def test_many_logprobs_of_a_stream_are_encoded_outside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, form: dict[str, object], in_thread: bool
) -> None:
    on_loop = []
    encode = SSEEncoder.encode

    def note_thread(encoder: SSEEncoder, deltas: list[Delta], counts: TokenCounts | None) -> bytes:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            on_loop.append(sum(len(delta.entries) + len(delta.prompt_logprobs or ()) for delta in deltas))
        return encode(encoder, deltas, counts)

    plain = served.complete(prompt=served.ids(TEXT)[:8], max_tokens=3, stream=True, **form).events()
    monkeypatch.setattr(SSEEncoder, "encode", note_thread)
    monkeypatch.setattr(generation, "MAX_ENTRIES", 5 if in_thread else 100)
    events = served.complete(prompt=served.ids(TEXT)[:8], max_tokens=3, stream=True, **form).events()
    assert join(events) == join(plain)
    assert (max(on_loop, default=0) <= 5) == in_thread
