"""Drafts from earlier text: if the latest ids occurred before, in this text or another, the same ids may follow."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

from serve_llm.engine.scheduler.ngram_index import NgramIndex, count_equal, hash_end
from serve_llm.engine.scheduler.recent_texts import RecentTexts
from serve_llm.engine.scheduler.sequence import Sequence

NONE = -1


class NgramDraft(NamedTuple):
    """Ids that may come next, because they followed an earlier occurrence of the text's end."""

    token_ids: Items[int]
    match_length: int  # ids of that occurrence


NO_DRAFT = NgramDraft((), 0)


class PromptLookup:
    """Finds the longest earlier occurrence of a text's end (the latest of equally long ones), or one in recent texts if
    it is longer. While the text continues like an occurrence in itself, no other is looked for."""

    def __init__(self, min_match: int, max_match: int, recent: RecentTexts | None = None) -> None:
        """min_match: minimum length of a match. max_match: longer matches are not preferred. recent: other texts, to
        which this one is added when it ends."""
        self._min_match = min_match
        self._max_match = max_match
        self._recent = recent
        self._index = NgramIndex(min_match)
        self._num_ids = 0  # length of the text when it was last seen
        self._end = NONE  # the position after the occurrence found then
        self._length = 0

    def propose(self, token_ids: Items[int], count: int) -> NgramDraft:
        """Return up to `count` ids that may come next. token_ids: prompt and output so far; they only ever grow."""
        num_ids = len(token_ids)
        self._index.extend(token_ids, num_ids - 1)  # each n-gram in it is followed by an id
        num_new = num_ids - self._num_ids
        continues = self._end != NONE and token_ids[self._end : self._end + num_new] == token_ids[self._num_ids :]
        self._num_ids = num_ids
        if continues:
            self._end += num_new
            self._length = min(self._max_match, self._length + num_new)
        else:
            self._end = NONE
            if num_ids < self._min_match:
                return NO_DRAFT
            ngram_hash = hash_end(token_ids, self._min_match)
            end, length = self._find(token_ids, ngram_hash)
            if self._recent is not None and length < self._max_match:
                found, longer = self._recent.find(token_ids, ngram_hash, count, length)
                if found:
                    return NgramDraft(found, longer)
            if end == NONE:
                return NO_DRAFT
            self._end = end
            self._length = length
        return NgramDraft(self._continue(token_ids, count), self._length)

    def _continue(self, token_ids: Items[int], count: int) -> list[int]:
        """Return the ids after the occurrence. It may overlap the text's end: then the text repeats itself."""
        drafts = list(token_ids[self._end : self._end + count])
        period = len(token_ids) - self._end
        while len(drafts) < count:
            drafts.append(drafts[len(drafts) - period])
        return drafts

    def finish(self, sequence: Sequence) -> None:
        """Record that the text has ended."""
        if self._recent is not None:
            self._recent.add(sequence.token_ids[sequence.num_prompt :])

    def _find(self, token_ids: Items[int], ngram_hash: int) -> tuple[int, int]:
        """Return the position after the best earlier occurrence of the text's end, NONE without one, and its length."""
        last = len(token_ids) - 1
        best = NONE
        best_length = self._min_match - 1
        for candidate in self._index.find(ngram_hash):
            length = count_equal(token_ids, candidate, token_ids, last, self._max_match, best_length)
            if length > best_length:
                best = candidate + 1
                best_length = length
                if length == self._max_match:
                    break
        return best, best_length
