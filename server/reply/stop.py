"""Stop strings in a stream of text: what could still become one is held back, what follows one is cut.

The first stop string to be complete ends the text; of several that are complete at the same character, the longest. So
the result does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """`matched` is None until a stop string is complete, then that string; nothing may be pushed after that."""

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self._stops = stops
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, armed: bool) -> str:
        """The text that is now certain. `armed`: a stop string may end within `text` (not so before min_tokens)."""
        window = self._held + text
        if armed and (cut := self._find(window, len(self._held))) is not None:
            self._held = ""
            return window[:cut]
        keep = self._possible_start(window)
        self._held = window[keep:]
        return window[:keep]

    def flush(self) -> str:
        """What was held back, when the text ends otherwise."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str, border: int) -> int | None:
        """Where to cut for the first stop string that ends after `border` (those before were not armed)."""
        best: tuple[int, int] | None = None  # end, start
        for stop in self._stops:
            start = window.find(stop, max(0, border - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
                self.matched = stop
        if best is None:
            return None
        return best[0] if self._include else best[1]

    def _possible_start(self, window: str) -> int:
        """Where the earliest proper beginning of a stop string starts that reaches to the window's end."""
        earliest = len(window)
        for stop in self._stops:
            start = window.find(stop[0], max(0, len(window) - len(stop) + 1))
            while 0 <= start < earliest:
                if stop.startswith(window[start:]):
                    earliest = start
                    break
                start = window.find(stop[0], start + 1)
        return earliest
