"""An index of where n-grams of ids end in a growing text: hash chains from the latest to the earliest, as in LZ77."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items

MAX_BUCKETS = 1 << 16
SPARE_BITS = 2  # at least four buckets for each id, so that few n-grams share one
MAX_CANDIDATES = 16  # earlier occurrences to examine
MANY = 8  # minimum number of ids for which setting up a faster loop pays off
NONE = -1


class NgramIndex:
    """Indexes each id once. Takes 4 bytes per id and per bucket."""

    def __init__(self, ngram_length: int, num_expected: int = 0) -> None:
        """num_expected: final number of ids, if the text will grow much."""
        self._ngram_length = ngram_length
        self._num_expected = num_expected
        self._mask = 0  # number of buckets - 1
        self._latest: array[int] = array("i")  # by bucket: where the latest n-gram ends
        self._previous: array[int] = array("i")  # by position: where the previous n-gram in its chain ends

    def extend(self, token_ids: Items[int], end: int) -> None:
        """Index the n-grams that end before the position `end`. token_ids: as before, with ids appended."""
        if not self._latest:
            num_bits = SPARE_BITS + max(end, self._num_expected).bit_length()
            self._latest = array("i", [NONE]) * min(MAX_BUCKETS, 1 << num_bits)
            self._mask = len(self._latest) - 1
        previous = self._previous
        if end <= len(previous):
            return
        latest = self._latest
        mask = self._mask
        before = self._ngram_length - 1
        previous.extend([NONE] * (min(end, before) - len(previous)))
        first = len(previous)
        ngrams: Iterable[tuple[int, ...]]
        if end - first < MANY:
            ngrams = [tuple(token_ids[position - before : position + 1]) for position in range(first, end)]
        else:
            new_ids = token_ids[first - before : end]
            ngrams = zip(*(new_ids[start:] for start in range(before + 1)), strict=False)
        for position, ngram in enumerate(ngrams, first):
            bucket = hash(ngram) & mask
            previous.append(latest[bucket])
            latest[bucket] = position

    def find(self, ngram_hash: int) -> Items[int]:
        """Return where n-grams end that probably have this hash (`hash_end`), most recent first."""
        if not self._latest:
            return ()
        candidate = self._latest[ngram_hash & self._mask]
        if candidate == NONE:
            return ()
        candidates: list[int] = []
        while candidate != NONE and len(candidates) < MAX_CANDIDATES:
            candidates.append(candidate)
            candidate = self._previous[candidate]
        return candidates


def hash_end(token_ids: Items[int], ngram_length: int) -> int:
    """Return the hash of the last n-gram of `token_ids`, which must be at least that long."""
    return hash(tuple(token_ids[len(token_ids) - ngram_length :]))


def count_equal(first_ids: Items[int], first: int, second_ids: Items[int], second: int, most: int, least: int) -> int:
    """Count how many ids before the positions `first` and `second` of two texts are equal. Returns 0 early if a single
    comparison shows that they are at most `least`."""
    shorter = min(first, second)
    if shorter < least or first_ids[first - least] != second_ids[second - least]:
        return 0
    length = 0
    while length < most and length <= shorter and first_ids[first - length] == second_ids[second - length]:
        length += 1
    return length
