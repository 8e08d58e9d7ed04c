"""What an engine process shows of itself in memory that outlives it: that it lives, since when it computes, and what.

The server reads it without asking: a process that is stopped, or whose step hangs, answers nothing, and of one that was
killed only this is left. Knows nothing of requests but their ids.
"""

from __future__ import annotations

import mmap
import struct
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BEAT_SECONDS = 0.25
CAPACITY = 65_536  # ids that are shown; a step of more sequences shows its first ones
_FIELDS = struct.Struct("=QddQ")
_COUNT = struct.Struct("=Q")
_COUNT_AT = _FIELDS.size - _COUNT.size


class Seen(NamedTuple):
    beats: int  # so often has it shown that it lives
    since: float  # monotonic seconds, the same in all processes: when what is under way began or last advanced; 0: idle
    longest: float  # seconds without an advance, the most so far
    num_ids: int


class Pulse:
    """A file in memory; the server makes it, the engine writes it."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        with path.open("w+b" if create else "r+b") as file:
            if create:
                file.truncate(_FIELDS.size + 8 * CAPACITY)  # sparse: pages come when they are written
            self._memory = mmap.mmap(file.fileno(), 0)
        self._beats = 0
        self._since = self._longest = 0.0

    def beat(self) -> None:
        """For a thread of its own, so that a long step does not look like a hang: says for ever that this lives."""
        while True:
            self._beats += 1
            _COUNT.pack_into(self._memory, 0, self._beats)
            time.sleep(BEAT_SECONDS)

    def show(self, ids: Sequence[int]) -> None:
        """What is under way from now on: called before a step is computed and after its results are booked."""
        now = time.monotonic()
        if self._since:
            self._longest = max(self._longest, now - self._since)
        self._since = now if ids else 0.0
        shown = array("Q", ids[:CAPACITY])
        _COUNT.pack_into(self._memory, _COUNT_AT, 0)  # whoever reads now finds none, rather than some of each
        self._memory[_FIELDS.size : _FIELDS.size + 8 * len(shown)] = shown.tobytes()
        struct.pack_into("=ddQ", self._memory, _COUNT.size, self._since, self._longest, len(shown))

    def read(self) -> Seen:
        return Seen(*_FIELDS.unpack_from(self._memory))

    def under_way(self) -> list[int]:
        """Ids of the requests in the steps that had begun and not ended when the engine was last heard of."""
        count = min(self.read().num_ids, CAPACITY)
        return array("Q", self._memory[_FIELDS.size : _FIELDS.size + 8 * count]).tolist()

    def close(self) -> None:
        self._memory.close()


def beside(address: str) -> Path:
    """The file for the engine that connects to this ipc:// address."""
    return Path(address.removeprefix("ipc://") + ".pulse")
