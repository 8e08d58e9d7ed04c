"""Finds requests that crash engines and ends them, so that all others finish.

A request whose engines died SUSPECT_DEATHS times in a row while they received or computed it is a suspect. Suspects run
one at a time, each alone on its engine. A suspect that makes progress is cleared; if its engine dies again, it is the
culprit. The deaths that it caused do not count against --max-restarts.
"""

from __future__ import annotations

from collections.abc import Iterable

from serve_llm.server.engines.tracked_request import TrackedRequest

SUSPECT_DEATHS = 2
CLEARING_TOKENS = 4  # output ids after a death that clear a request; fewer may have been in flight at the death


class Quarantine:
    """Which requests are suspects, and which engine runs which suspect alone."""

    def __init__(self) -> None:
        self._isolated: dict[int, TrackedRequest] = {}  # engine index -> the suspect that runs there alone

    def record_loss(self, tracked: TrackedRequest, *, was_computed: bool) -> None:
        """Record that the request's engine is gone. was_computed: the request was part of a step, or had just been
        received, when the engine died."""
        tracked.num_deaths += was_computed
        tracked.cleared_at = tracked.num_received + CLEARING_TOKENS

    def clear(self, tracked: TrackedRequest) -> None:
        tracked.num_deaths = 0

    def is_suspect(self, tracked: TrackedRequest) -> bool:
        return tracked.num_deaths >= SUSPECT_DEATHS

    def find_culprit(self, lost: Iterable[int]) -> TrackedRequest | None:
        """End the isolation on the lost engines and return the suspect that killed one, if any. Call after
        `record_loss`."""
        isolated = [self._isolated.pop(index) for index in lost if index in self._isolated]
        return next((tracked for tracked in isolated if tracked.num_deaths > SUSPECT_DEATHS), None)

    def is_reserved(self, engine: int) -> bool:
        """Whether a suspect runs alone on this engine."""
        return engine in self._isolated

    def choose_suspect(self, waiting: Iterable[TrackedRequest]) -> TrackedRequest | None:
        """Return the waiting request to isolate next; None while another one is isolated or if there is no suspect.

        A request that crashes engines makes no progress, and requests that ran before it arrived are innocent, so the
        suspect with the fewest tokens comes first, and the newest among equals.
        """
        if self._isolated:
            return None
        suspects = (tracked for tracked in waiting if self.is_suspect(tracked))
        return min(suspects, key=lambda tracked: (tracked.num_received, -tracked.id), default=None)

    def isolate(self, tracked: TrackedRequest, engine: int) -> None:
        self._isolated[engine] = tracked

    def release(self, tracked: TrackedRequest) -> bool:
        """Forget a request that has ended or was cleared. Returns whether it was isolated."""
        if self._isolated.get(tracked.engine) is not tracked:
            return False
        del self._isolated[tracked.engine]
        return True
