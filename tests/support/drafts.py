"""Engines whose drafts come from a head that reads hidden states."""

from __future__ import annotations

from collections.abc import Sequence

from serve_llm.engine.draft_model.head_draft_model import HeadDraftModel
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.scheduler.speculation import ModelSpeculator
from support.speculation import assert_drafted


def find_draft_model(engine: EngineCore) -> HeadDraftModel:
    assert isinstance(engine._speculator, ModelSpeculator)
    assert isinstance(engine._speculator._proposer, HeadDraftModel)
    return engine._speculator._proposer


def check_head(engine: EngineCore) -> None:
    """Assert that some guesses were right, some wrong, and that the head has released everything."""
    assert_drafted(engine)
    model = find_draft_model(engine)
    model.sequences.check_integrity()
    assert not model.sequences._drafts and not model._waiting and not model._outputs, "a request that has ended"


def record_guesses(engine: EngineCore) -> list[tuple[list[int], list[int]]]:
    """Record all guesses from now on, each with the preceding ids. There are no drafts from texts, which would take the
    place of some."""
    assert isinstance(engine._speculator, ModelSpeculator)
    engine._speculator.texts = None
    model = find_draft_model(engine)
    propose = model.propose
    found: list[tuple[list[int], list[int]]] = []

    def recorded(wanted: Sequence[tuple[object, int]]) -> list[list[int]]:
        guesses = propose(wanted)
        found.extend((list(one.token_ids), list(own)) for (one, _), own in zip(wanted, guesses, strict=True))
        return guesses

    model.propose = recorded
    return found
