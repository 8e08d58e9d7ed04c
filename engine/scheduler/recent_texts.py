"""Recent outputs, as a source of drafts for later ones. Bounded.

Only requests with the same API key and cache salt share them, because the speed of a text would reveal the outputs of
others.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Items

from serve_llm.common.types import EngineCoreRequest
from serve_llm.engine.scheduler.ngram_index import NgramIndex, count_equal

MAX_IDS = 1 << 15  # ids kept per group of requests; about 0.6 MB with the index
MAX_GROUPS = 32
END = -1  # after each text


class RecentTexts:
    """The outputs of one group of requests, most recent last."""

    def __init__(self, min_match: int, max_match: int) -> None:
        """See `PromptLookup`."""
        self._min_match = min_match
        self._max_match = max_match
        self._ids = array("i")
        self._index = NgramIndex(min_match, MAX_IDS)

    def add(self, token_ids: Items[int]) -> None:
        """Add a text. If there are too many ids, drop the older half."""
        self._ids.extend(token_ids[-MAX_IDS // 2 :])
        self._ids.append(END)
        if len(self._ids) > MAX_IDS:
            self._ids = self._ids[self._ids.index(END, len(self._ids) - 1 - MAX_IDS // 2) + 1 :]
            self._index = NgramIndex(self._min_match, MAX_IDS)
        self._index.extend(self._ids, len(self._ids))

    def find(self, token_ids: Items[int], ngram_hash: int, count: int, least: int) -> tuple[list[int], int]:
        """Return up to `count` ids that followed the end of `token_ids` in the text with the longest match, if it is
        longer than `least`; and the length of the match. ngram_hash: of the last ids; see `NgramIndex.find`."""
        best: list[int] = []
        best_length = least
        last = len(token_ids) - 1
        for candidate in self._index.find(ngram_hash):
            length = count_equal(self._ids, candidate, token_ids, last, self._max_match, best_length)
            if length <= best_length or self._ids[candidate + 1] == END:
                continue
            following = self._ids[candidate + 1 : candidate + 1 + count].tolist()
            best = following[: following.index(END)] if END in following else following
            best_length = length
            if length == self._max_match:
                break
        return best, best_length


class RecentTextGroups:
    """The recent texts of each group of requests; the least recently used groups are dropped."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._lengths = (min_match, max_match)
        self._groups: OrderedDict[tuple[int, str], RecentTexts] = OrderedDict()

    def find(self, request: EngineCoreRequest) -> RecentTexts:
        """Find the texts that the request may see."""
        key = (request.tenant, request.cache_salt)
        if key not in self._groups:
            self._groups[key] = RecentTexts(*self._lengths)
            if len(self._groups) > MAX_GROUPS:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return self._groups[key]
