"""An index of where runs of ids end in a growing text: hash chains from the latest to the earliest, as in LZ77."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items

MAX_BUCKETS = 1 << 16
MAX_CANDIDATES = 16  # earlier occurrences to examine
NONE = -1


class RunIndex:
    """Indexes each id once. Takes 4 bytes per id and per bucket."""

    def __init__(self, run_length: int, num_expected: int = 0) -> None:
        """num_expected: final number of ids, if the text will grow much."""
        self._run_length = run_length
        self._num_expected = num_expected
        self._num_indexed = 0  # runs that end before this position are indexed
        self._latest: array[int] = array("i")  # by bucket: where the latest run ends
        self._previous: array[int] = array("i")  # by position: where the previous run in its chain ends

    def extend(self, token_ids: Items[int], end: int) -> None:
        """Index the runs that end before the position `end`. token_ids: as before, and more."""
        if not self._latest:
            num_bits = max(8, max(end, self._num_expected).bit_length())
            self._latest = array("i", [NONE]) * min(MAX_BUCKETS, 1 << num_bits)
        start = max(self._num_indexed, self._run_length - 1)
        self._previous.extend([NONE] * (end - len(self._previous)))
        mask = len(self._latest) - 1
        for position in range(start, end):
            bucket = hash(tuple(token_ids[position - self._run_length + 1 : position + 1])) & mask
            self._previous[position] = self._latest[bucket]
            self._latest[bucket] = position
        self._num_indexed = max(self._num_indexed, end)

    def find(self, token_ids: Items[int]) -> Iterator[int]:
        """Yield where runs end that probably equal the last run of `token_ids`, the latest first."""
        if len(token_ids) < self._run_length or not self._latest:
            return
        mask = len(self._latest) - 1
        candidate = self._latest[hash(tuple(token_ids[len(token_ids) - self._run_length :])) & mask]
        for _ in range(MAX_CANDIDATES):
            if candidate == NONE:
                return
            yield candidate
            candidate = self._previous[candidate]


def count_equal(first_ids: Items[int], first: int, second_ids: Items[int], second: int, most: int) -> int:
    """Count how many ids before the positions `first` and `second` of two texts are equal."""
    length = 0
    while length < most and length <= min(first, second) and first_ids[first - length] == second_ids[second - length]:
        length += 1
    return length
