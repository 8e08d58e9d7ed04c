"""Drafts for tests of engines: from a run without drafts, so that most are accepted whatever the sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_llm.common.types import Request
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.scheduler.speculation import RowCost
from support.engine import Result

NGRAM: dict[str, object] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


class KnownTexts:
    """Proposes what the texts say, and now and then something else."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong_every: int) -> None:
        self._texts = [list(text) for text in texts]
        self._wrong_every = wrong_every

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        ids = list(token_ids)
        for text in self._texts:
            if len(text) > len(ids) and text[: len(ids)] == ids:
                places = range(len(ids), min(len(text), len(ids) + count))
                drafts = [1 if place % self._wrong_every == 0 else text[place] for place in places]
                return [*drafts, *([2] * (count - len(drafts)))]  # beyond the end, where nothing is accepted
        return []


class FreeRows(RowCost):
    """Rows cost nothing, so that what is drafted does not depend on the machine."""

    def share(self, num_rows: int) -> float:
        return 0.0


def draft_freely(engine: EngineCore) -> EngineCore:
    """Draft whatever the engine's steps take."""
    assert engine._speculator is not None
    engine._speculator.row_cost = FreeRows()
    return engine


def draft_from(
    engine: EngineCore, requests: Sequence[Request], results: Mapping[int, Result], wrong_every: int = 5
) -> EngineCore:
    """Draft what `results` say, with a wrong id at every `wrong_every`-th position."""
    texts = [[*request.prompt_ids, *results[request.id].token_ids] for request in requests]
    speculator = draft_freely(engine)._speculator
    assert speculator is not None
    speculator._build_source = lambda: KnownTexts(texts, wrong_every)
    return engine


def assert_drafted(engine: EngineCore) -> None:
    """Some drafts were accepted and some were not."""
    stats = engine.scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens, stats
