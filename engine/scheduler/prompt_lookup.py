"""Drafts from earlier text: if the latest ids occurred before, in this text or another, the same ids may follow."""

from __future__ import annotations

from collections.abc import Sequence as Items

from serve_llm.engine.scheduler.recent_texts import RecentTexts
from serve_llm.engine.scheduler.run_index import RunIndex, count_equal
from serve_llm.engine.scheduler.sequence import Sequence

NONE = -1


class PromptLookup:
    """Finds the longest earlier occurrence of a text's end, the latest among equally long ones, or a longer one in
    recent texts."""

    def __init__(self, min_match: int, max_match: int, recent: RecentTexts | None = None) -> None:
        """min_match: minimum length of a match. max_match: longer matches are not preferred. recent: other texts, to
        which this one is added when it ends."""
        self._min_match = min_match
        self._max_match = max_match
        self._recent = recent
        self._index = RunIndex(min_match)

    def propose(self, token_ids: Items[int], count: int) -> list[int]:
        """Up to `count` ids that may come next. token_ids: prompt and output so far; they only ever grow."""
        self._index.extend(token_ids, len(token_ids) - 1)  # each run in it is followed by an id
        end, length = self._find(token_ids)
        if self._recent is not None and length < self._max_match:
            found = self._recent.find(token_ids, count, length)
            if found:
                return found
        if end == NONE:
            return []
        drafts = list(token_ids[end : end + count])
        period = len(token_ids) - end
        while len(drafts) < count:  # the match overlaps the end, so the text repeats itself
            drafts.append(drafts[len(drafts) - period])
        return drafts

    def finish(self, sequence: Sequence) -> None:
        """The text ends."""
        if self._recent is not None:
            self._recent.add(sequence.token_ids[sequence.num_prompt :])

    def _find(self, token_ids: Items[int]) -> tuple[int, int]:
        """Return the position after the best earlier occurrence of the text's end, NONE without one, and its length."""
        last = len(token_ids) - 1
        best = NONE
        best_length = self._min_match - 1
        for candidate in self._index.find(token_ids):
            length = count_equal(token_ids, candidate, token_ids, last, self._max_match)
            if length > best_length:
                best = candidate + 1
                best_length = length
                if length == self._max_match:
                    break
        return best, best_length
