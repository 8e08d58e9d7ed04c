"""The heartbeat of an engine process, in shared memory that outlives it: a beat counter, when the current step
began, and the ids of its requests.

The server reads it even if the engine is stopped, hangs in a step, or was killed.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BEAT_SECONDS = 0.25
CAPACITY = 65_536  # request ids; a larger step records only its first ones
_FIELDS = struct.Struct("=QddQ")
_COUNT = struct.Struct("=Q")
_COUNT_AT = _FIELDS.size - _COUNT.size


class HeartbeatReading(NamedTuple):
    beats: int  # counts up every BEAT_SECONDS while the process runs
    since: float  # time.monotonic() when the current work began or last advanced; 0: idle
    longest: float  # longest time without an advance so far, in seconds
    num_ids: int


class Heartbeat:
    """A memory-mapped file, created by the server and written by the engine."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Raises OSError if the disk is full."""
        with path.open("w+b" if create else "r+b") as file:
            if create:
                # With all its blocks: on a full disk, access to a hole of a mapped file ends the process by SIGBUS.
                os.posix_fallocate(file.fileno(), 0, _FIELDS.size + 8 * CAPACITY)
            self._memory = mmap.mmap(file.fileno(), 0)
        self._beats = 0
        self._since = 0.0
        self._longest = 0.0

    def beat(self) -> None:
        """Count up forever. Runs in its own thread, so that a long step does not look like a hang."""
        while True:
            self._beats += 1
            _COUNT.pack_into(self._memory, 0, self._beats)
            time.sleep(BEAT_SECONDS)

    def show(self, ids: Sequence[int]) -> None:
        """Record the request ids of the steps in flight: called before a step is computed and after its results are
        processed."""
        now = time.monotonic()
        if self._since:
            self._longest = max(self._longest, now - self._since)
        self._since = now if ids else 0.0
        shown = array("Q", ids[:CAPACITY])
        _COUNT.pack_into(self._memory, _COUNT_AT, 0)  # a concurrent reader sees no ids rather than a mixture
        self._memory[_FIELDS.size : _FIELDS.size + 8 * len(shown)] = shown.tobytes()
        struct.pack_into("=ddQ", self._memory, _COUNT.size, self._since, self._longest, len(shown))

    def read(self) -> HeartbeatReading:
        return HeartbeatReading(*_FIELDS.unpack_from(self._memory))

    def read_running_ids(self) -> list[int]:
        """Ids of the requests in the steps that were in flight at the last `show`."""
        count = min(self.read().num_ids, CAPACITY)
        return array("Q", self._memory[_FIELDS.size : _FIELDS.size + 8 * count]).tolist()

    def close(self) -> None:
        self._memory.close()


def heartbeat_path(address: str) -> Path:
    """The heartbeat file of the engine that connects to this ipc:// address."""
    return Path(address.removeprefix("ipc://") + ".pulse")
