"""Finds stop strings in a stream of text: holds back text that may begin one, and drops text after one.

The first complete stop string ends the text; if several end at the same character, the longest one does. The result
does not depend on how the text is split into pieces.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence


class StopScanner:
    """`matched` is None until a stop string is complete, then that string; push nothing after that."""

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self._longest = max(map(len, stops), default=0)
        self._sorted = sorted(set(stops))
        self._firsts = {stop[0] for stop in stops}
        self._by_last: dict[str, list[str]] = {}  # by the last character: most end no stop string
        for stop in self._sorted:
            self._by_last.setdefault(stop[-1], []).append(stop)
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, armed: bool) -> str:
        """Return the text that is now final. armed: a stop string may end within `text`; False before min_tokens."""
        window = self._held + text
        cut = self._find_cut(window, len(self._held)) if armed else None
        if cut is not None:
            self._held = ""
            return window[:cut]
        end = self._find_possible_start(window)
        self._held = window[end:]
        return window[:end]

    def flush(self) -> str:
        """Return the text that was held back, once the text has ended without a stop string."""
        held = self._held
        self._held = ""
        return held

    def _find_cut(self, window: str, border: int) -> int | None:
        """Find where to cut for the first stop string that ends after `border`; earlier text was not armed."""
        best: tuple[int, int] | None = None  # (end, start)
        for last in set(window[border:]) & self._by_last.keys():
            for stop in self._by_last[last]:
                start = window.find(stop, max(0, border - len(stop) + 1))
                if start >= 0 and (best is None or (start + len(stop), start) < best):
                    best = (start + len(stop), start)
                    self.matched = stop
        if best is None:
            return None
        return best[0] if self._include else best[1]

    def _find_possible_start(self, window: str) -> int:
        """Find the start of the longest suffix of the window that is a proper prefix of a stop string."""
        for start in range(max(0, len(window) - self._longest + 1), len(window)):
            if window[start] in self._firsts:
                suffix = window[start:]
                after = bisect.bisect_right(self._sorted, suffix)  # strings that begin with the suffix come next
                if after < len(self._sorted) and self._sorted[after].startswith(suffix):
                    return start
        return len(window)
