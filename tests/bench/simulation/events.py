"""The virtual clock and its queue of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class EventQueue:
    """Runs actions in order of time; those with equal times in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.num_run = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._num_added = 0

    def read(self) -> float:
        """The current time."""
        return self.now

    def add(self, at: float, action: Action) -> None:
        self._num_added += 1
        heapq.heappush(self._heap, (at, self._num_added, action))

    def run(self) -> None:
        """Run until the queue is empty."""
        while self._heap:
            self.now, _, action = heapq.heappop(self._heap)
            self.num_run += 1
            action()
