"""Detects repetition: ids that end with the same pattern several times in a row."""

from __future__ import annotations

from collections import deque

from serve_llm.server.sampling_params import RepetitionDetection


class RepetitionDetector:
    """Costs one comparison per token and pattern size."""

    def __init__(self, params: RepetitionDetection) -> None:
        self._min_count = params.min_count
        self._sizes = range(params.min_pattern_size, params.max_pattern_size + 1)
        self._last_ids: deque[int] = deque(maxlen=params.max_pattern_size)  # newest first
        self._num_equal = [0] * len(self._sizes)  # by size: current run of ids equal to the one `size` before

    def push(self, token_id: int) -> bool:
        """Add an id. Returns whether the ids now end with enough repetitions of a pattern."""
        last_ids = self._last_ids
        num_equal = self._num_equal
        is_found = False
        for index, size in enumerate(self._sizes):
            if len(last_ids) < size or last_ids[size - 1] != token_id:
                num_equal[index] = 0
                continue
            num_equal[index] += 1
            is_found = is_found or num_equal[index] >= size * (self._min_count - 1)
        last_ids.appendleft(token_id)
        return is_found
