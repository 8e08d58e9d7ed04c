"""Pushes the new output of all streams in one event-loop callback per step."""

from __future__ import annotations

import asyncio
from typing import Protocol


class PushedGeneration(Protocol):
    """`server.generate.generation.Generation`."""

    def push_changes(self) -> None:
        """Raises nothing."""


class PushQueue:
    """Shared by all generations, because one event-loop callback per generation costs more than the push itself."""

    def __init__(self) -> None:
        self._waiting: list[PushedGeneration] = []

    def add(self, generation: PushedGeneration) -> None:
        """Call its `push_changes` soon. Called in the event loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        self._waiting.append(generation)

    def _run(self) -> None:
        waiting = self._waiting
        self._waiting = []
        for generation in waiting:
            generation.push_changes()
