"""The cache of compiled grammars: what it keeps, and for how long."""

from __future__ import annotations

from serve_llm.server.structured_output.compiler import RETRY_SECONDS, Grammar, GrammarCache, build_death_refusal
from serve_llm.server.structured_output.errors import GrammarError


def test_it_is_bounded() -> None:
    cache = GrammarCache(max_bytes=1000)
    for number in range(10):
        cache.put(bytes([number]), Grammar("x" * 100))
    assert [number for number in range(10) if cache.get(bytes([number])) is not None] == [7, 8, 9]


def test_a_compilation_that_was_ended_is_tried_again_later() -> None:
    now = [0.0]
    cache = GrammarCache(max_bytes=1000, clock=lambda: now[0])
    refused = Grammar(error="it is wrong", param="regex")
    ended = build_death_refusal("regex", GrammarError(""), "it took too long")
    cache.put(b"refused", refused)
    cache.put(b"ended", ended)
    now[0] = RETRY_SECONDS
    assert cache.get(b"ended") == ended
    now[0] = RETRY_SECONDS + 1
    assert cache.get(b"ended") is None
    assert cache.get(b"refused") == refused
    compiled = Grammar("x" * 100)
    cache.put(b"ended", compiled)
    now[0] = 10 * RETRY_SECONDS
    assert cache.get(b"ended") == compiled
