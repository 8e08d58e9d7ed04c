"""How a step's message reaches all ranks and the answer comes back. One channel per host; this one is shared memory.

Bytes only: what they mean is the executor's and the rank program's business.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from serve_llm.engine.parallel.ring import Ring

STEP_SECONDS = 300.0  # without an answer for so long, a step has failed; a large prompt on a CPU takes many seconds


class StepChannel(Protocol):
    """The engine's end."""

    def send(self, message: bytes) -> None:
        """To all ranks. Raises TimeoutError if they do not take it within STEP_SECONDS, Closed after `close`."""

    def receive(self) -> bytes:
        """The next answer. Raises TimeoutError after STEP_SECONDS, Closed after `close`."""

    def close(self) -> None:
        """End all waits, here and in the ranks, which then end themselves."""


class StepSource(Protocol):
    """A rank's end. Both calls raise Closed when the engine has closed the channel."""

    def receive(self) -> bytes:
        """The next step; waits for ever."""

    def answer(self, message: bytes) -> None: ...


class RingSteps:
    """See `StepChannel`: the engine writes the ring `steps`, the rank that samples writes `answers`."""

    def __init__(self, steps: Ring, answers: Ring) -> None:
        self._rings = (steps, answers)
        self._steps = steps.writer()
        self._answers = answers.reader(0)
        self._arrived: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        self._steps.send(message, STEP_SECONDS, self._take_answers)

    def _take_answers(self) -> None:
        """A rank that cannot get rid of an answer takes no step."""
        while self._answers.ready:
            self._arrived.append(self._answers.receive(STEP_SECONDS))

    def receive(self) -> bytes:
        return self._arrived.popleft() if self._arrived else self._answers.receive(STEP_SECONDS)

    def close(self) -> None:
        for ring in self._rings:
            ring.close()


class RingSource:
    """See `StepSource`."""

    def __init__(self, steps: Ring, reader: int, answers: Ring | None) -> None:
        self._steps = steps.reader(reader)
        self._answers = answers.writer() if answers is not None else None

    def receive(self) -> bytes:
        return self._steps.receive()

    def answer(self, message: bytes) -> None:
        assert self._answers is not None, "only the rank that samples has answers"
        self._answers.send(message)
