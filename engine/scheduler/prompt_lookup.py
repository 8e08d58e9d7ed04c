"""Drafts from the text itself: where its latest ids occurred before, it may go on in the same way."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

MAX_BUCKETS = 1 << 16
MAX_CANDIDATES = 16  # earlier occurrences that are looked at
NONE = -1


class PromptLookup:
    """Finds the longest earlier occurrence of a text's end, of several equally long ones the latest.

    Every run of `min_match` ids is in a hash chain from the latest to the earliest, as in LZ77, so each id is indexed
    once. Takes 4 bytes per id and per bucket.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        """min_match: ids of the shortest occurrence that counts. max_match: more ids do not make it better."""
        self._min_match = min_match
        self._max_match = max_match
        self._num_indexed = 0  # runs that end before this position are indexed
        self._latest: array[int] = array("i")  # by bucket: where the latest run ends
        self._previous: array[int] = array("i")  # by position: where the run before in its chain ends

    def propose(self, token_ids: Items[int], count: int) -> list[int]:
        """Up to `count` ids that may come next. token_ids: prompt and output so far; they only ever grow."""
        self._index(token_ids)
        end = self._find(token_ids)
        if end == NONE:
            return []
        drafts = list(token_ids[end : end + count])
        period = len(token_ids) - end
        while len(drafts) < count:  # the occurrence reaches into the end itself: the text repeats itself
            drafts.append(drafts[len(drafts) - period])
        return drafts

    def _index(self, token_ids: Items[int]) -> None:
        """Index the runs that end before the text's last id, so that each is followed by one."""
        end = len(token_ids) - 1
        if not self._latest:
            num_buckets = min(MAX_BUCKETS, 1 << max(8, end.bit_length()))
            self._latest = array("i", [NONE]) * num_buckets
        start = max(self._num_indexed, self._min_match - 1)
        self._previous.extend([NONE] * (end - len(self._previous)))
        mask = len(self._latest) - 1
        for position in range(start, end):
            bucket = hash(tuple(token_ids[position - self._min_match + 1 : position + 1])) & mask
            self._previous[position] = self._latest[bucket]
            self._latest[bucket] = position
        self._num_indexed = max(self._num_indexed, end)

    def _find(self, token_ids: Items[int]) -> int:
        """The position after the best earlier occurrence of the text's end; NONE if there is none."""
        if len(token_ids) < self._min_match:
            return NONE
        last = len(token_ids) - 1
        mask = len(self._latest) - 1
        candidate = self._latest[hash(tuple(token_ids[last - self._min_match + 1 :])) & mask]
        best = NONE
        best_length = self._min_match - 1
        for _ in range(MAX_CANDIDATES):
            if candidate == NONE or best_length == self._max_match:
                break
            length = _count_equal(token_ids, candidate, last, self._max_match)
            if length > best_length:
                best = candidate + 1
                best_length = length
            candidate = self._previous[candidate]
        return best


def _count_equal(token_ids: Items[int], first: int, second: int, most: int) -> int:
    """How many ids up to the positions first < second are equal."""
    length = 0
    while length < most and length <= first and token_ids[first - length] == token_ids[second - length]:
        length += 1
    return length
