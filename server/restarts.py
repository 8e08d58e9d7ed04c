"""When a dead engine is replaced: at once, later, or not any more. Arithmetic only."""

from __future__ import annotations

from collections import deque

from serve_llm.engine.errors import CapacityError, OptionError, ServeError

WINDOW_SECONDS = 600.0  # in which --max-restarts are allowed
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before an engine is started again that dies again and again


class Restarts:
    """Of all engines together."""

    def __init__(self, limit: int) -> None:
        """limit: restarts in a window; the next death is one too many."""
        self._limit = limit
        self._deaths: deque[tuple[float, ServeError]] = deque()  # of the window
        self._in_vain = 0  # deaths in a row without a request finished in between
        self._finished = -1

    def after(self, error: ServeError, now: float, num_finished: int) -> float:
        """Seconds to wait before the engine that died of this is started again.

        num_finished: requests so far. An engine that gets work done is replaced at once; one that does not, after
        pauses that double. Raises what the first of too many deaths was; that memory or devices are missing, as when a
        host is lost, is no death: they may come back.
        """
        self._in_vain = 0 if num_finished > self._finished else self._in_vain + 1
        self._finished = num_finished
        if not isinstance(error, CapacityError | OptionError):
            self._count(error, now)
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._in_vain - 1, 16)) if self._in_vain else 0.0

    def forgive(self, number: int) -> None:
        """The request that caused the last deaths has been found and ended: they do not count."""
        for _ in range(min(number, len(self._deaths))):
            self._deaths.pop()

    def _count(self, error: ServeError, now: float) -> None:
        while self._deaths and self._deaths[0][0] < now - WINDOW_SECONDS:
            self._deaths.popleft()
        self._deaths.append((now, error))
        if len(self._deaths) > self._limit:
            raise self._summary()

    def _summary(self) -> ServeError:
        """The first cause, under its class, which gives the exit code."""
        first, last = self._deaths[0][1], self._deaths[-1][1]
        if len(self._deaths) == 1:
            return first
        again = "" if str(last) == str(first) else f"; the last time: {last}"
        return type(first)(
            f"{first}; then the engine died {len(self._deaths) - 1} more times within {WINDOW_SECONDS / 60:.0f} "
            f"minutes (--max-restarts {self._limit}){again}"
        )
