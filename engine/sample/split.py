"""Sampling where the logits' columns are shared out over ranks: whole rows are gathered only where a request needs it.

Which way a row takes follows from its parameters, which all ranks know, or from what all have gathered, so that every
rank makes the same collective calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from serve_llm.engine.parallel.comm import Group
from serve_llm.engine.sample.sampler import Drawn, Sampled, Sampler, SampleRow, drawn, is_greedy, is_plain
from serve_llm.engine.sample.vocabulary import Vocabulary

FEW = 128  # the largest top_k for which candidates are gathered instead of whole rows


class SplitSampler:
    """One per worker of a tensor-parallel group on the last stage. Draws what `Sampler` would from whole rows."""

    def __init__(self, sampler: Sampler, vocabulary: Vocabulary, group: Group) -> None:
        self._sampler = sampler
        self._vocabulary = vocabulary
        self._draws = group.rank == 0

    def start(self, logits: Tensor, rows: Sequence[SampleRow]) -> Drawn:
        """`sample`, which it does at once."""
        return drawn(self.sample(logits, rows))

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Sampled | None]:
        """As `Sampler.sample`, on the group's first rank; what others return is of no use. logits: (rows, own)."""
        found: list[Sampled | None] = [None] * len(rows)
        ways: dict[str, list[int]] = {"likeliest": [], "candidates": [], "whole": []}
        for place, row in enumerate(rows):
            ways[_way(row)].append(place)
        if places := ways["likeliest"]:
            for place, token_id in zip(places, self._vocabulary.likeliest(logits[places]).tolist(), strict=True):
                found[place] = None if token_id < 0 else Sampled(token_id, None)
        if places := ways["candidates"]:
            ways["whole"] += self._sample_few(logits, rows, places, found)
        if places := ways["whole"]:
            whole = self._vocabulary.whole(logits[places])
            if self._draws:
                for place, sampled in zip(places, self._sampler.sample(whole, [rows[i] for i in places]), strict=True):
                    found[place] = sampled
        return found

    def _sample_few(
        self, logits: Tensor, rows: Sequence[SampleRow], places: list[int], found: list[Sampled | None]
    ) -> list[int]:
        """Sample from candidates; returns the places where they are not all there."""
        most = max(rows[place].sampling.top_k for place in places)
        values, ids, missing = self._vocabulary.candidates(logits[places], most)
        if self._draws:
            drawn = self._sampler.draw(values, [rows[place] for place in places])
            for index, place in enumerate(places):
                found[place] = None if drawn[index] < 0 else Sampled(int(ids[index, drawn[index]]), None)
        return [places[index] for index in missing]


def _way(row: SampleRow) -> str:
    if not is_plain(row):
        return "whole"
    if is_greedy(row.sampling):
        return "likeliest"
    return "candidates" if 0 < row.sampling.top_k <= FEW else "whole"
