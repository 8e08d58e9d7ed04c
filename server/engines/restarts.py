"""Decides whether and when a dead engine is restarted."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from serve_llm.common.errors import CapacityError, HostLost, OptionError, ServeError

WINDOW_SECONDS = 600.0  # the window that --max-restarts counts in
HOST_LOSS_SECONDS = 10.0  # within which all engines of a lost host have died
# Seconds before a restart of an engine that dies repeatedly without finishing a request.
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
LONGEST_DEVICE_PAUSE = 5.0  # while devices are missing: they may come back at any time


@dataclass(frozen=True)
class RestartRecord:
    """The replacement of one engine process."""

    engine: int  # index of the engine
    reason: str  # one of `server.metrics.meter.RESTART_REASONS`
    cause: str  # the first cause
    time: float = field(default_factory=time.time)  # Unix seconds


class RestartPolicy:
    """One restart budget and backoff for all engines together."""

    def __init__(self, limit: int) -> None:
        """limit: restarts allowed in a window."""
        self._limit = limit
        self._deaths: deque[tuple[float, ServeError]] = deque()  # (time, cause) within the window
        self._num_idle_deaths = 0  # deaths in a row with no request finished in between
        self._num_finished = -1

    def record_death(self, error: ServeError, now: float, num_finished: int) -> float:
        """Return the seconds to wait before the engine is started again.

        An engine that finishes requests is restarted at once; otherwise pauses double. Missing memory or devices, as
        after the loss of a host, do not count as deaths: they may come back. A lost host counts once, however many
        engines had ranks there. Raises the first cause in the window when deaths exceed the limit.

        num_finished: requests finished so far, by all engines.
        """
        self._num_idle_deaths = 0 if num_finished > self._num_finished else self._num_idle_deaths + 1
        self._num_finished = num_finished
        if not isinstance(error, CapacityError | OptionError):
            self._count(error, now)
        if self._num_idle_deaths == 0:
            return 0.0
        longest = LONGEST_DEVICE_PAUSE if isinstance(error, CapacityError) else LONGEST_PAUSE
        return min(longest, FIRST_PAUSE * 2.0 ** min(self._num_idle_deaths - 1, 16))

    def drop_last_deaths(self, number: int) -> None:
        """Remove the last deaths from the budget, because the request that caused them was found and ended."""
        for _ in range(min(number, len(self._deaths))):
            self._deaths.pop()

    def _count(self, error: ServeError, now: float) -> None:
        while self._deaths and self._deaths[0][0] < now - WINDOW_SECONDS:
            self._deaths.popleft()
        if self._deaths and isinstance(error, HostLost):
            last, cause = self._deaths[-1]
            if isinstance(cause, HostLost) and now - last < HOST_LOSS_SECONDS:
                return
        self._deaths.append((now, error))
        if len(self._deaths) > self._limit:
            raise self._summary()

    def _summary(self) -> ServeError:
        """Add the number of other deaths to the first cause. Keeps its class, which determines the exit code."""
        first = self._deaths[0][1]
        last = self._deaths[-1][1]
        if len(self._deaths) == 1:
            return first
        again = "" if str(last) == str(first) else f"; the last time: {last}"
        return type(first)(
            f"{first}; then the engine died {len(self._deaths) - 1} more times within {WINDOW_SECONDS / 60:.0f} "
            f"minutes (--max-restarts {self._limit}){again}"
        )
