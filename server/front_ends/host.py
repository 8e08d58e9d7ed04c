"""A host on which front ends run, as `FrontEndGroup` sees it."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod

from serve_llm.common.options.schema import Options
from serve_llm.server.front_ends.messages import Activate, Drain
from serve_llm.server.front_ends.process import FrontEndProcess, LocalFrontEnd

# Seconds before the next start after consecutive processes that did not load.
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0


class FrontEndHost(ABC):
    """The processes on one host: those that answer clients, and a spare one, already loaded, that replaces one that
    ends."""

    name: str | None  # None: this host
    has_own_clock: bool  # its monotonic clock is not that of the server process

    def __init__(self, num_wanted: int, server_socket: str) -> None:
        """num_wanted: processes that should answer clients. server_socket: path on that host of the Unix socket on
        which the server process answers HTTP."""
        self.num_wanted = num_wanted  # 0: none, and no spare one either
        self.server_socket = server_socket
        self.processes: list[FrontEndProcess] = []
        self._num_failed = 0  # consecutive processes that did not load
        self._next_start = 0.0  # time.monotonic() seconds; no process is started before

    @abstractmethod
    def launch(self, number: int, revision: int) -> FrontEndProcess:
        """See `FrontEndProcess`."""

    def adapt(self, options: Options) -> Options:
        """Adapt the server's options for front ends on that host."""
        return options

    def find_directory(self, directory: str) -> str:
        """Return the checkpoint on that host. directory: on the server's host."""
        return directory

    @property
    def num_serving(self) -> int:
        return len(self._list("serving"))

    @property
    def is_loaded(self) -> bool:
        """Whether no process is still loading."""
        return not self._list("loading")

    @property
    def has_failed(self) -> bool:
        """Whether the newest process ended instead of loading."""
        return self._num_failed > 0

    def advance(self, revision: int, drain_seconds: float) -> int:
        """Activate or drain processes to reach the wanted number of this revision. Returns how many to start, including
        the spare."""
        serving = self._list("serving")
        outdated = [one for one in serving if one.revision != revision]
        spares = [one for one in self._list("spare") if one.revision == revision]
        old_spares = [one for one in self._list("spare") if one.revision != revision]
        if spares:
            for process in old_spares:
                process.kill()
        else:  # nothing of this revision is loaded yet
            spares = old_spares
        while spares and len(serving) < self.num_wanted:
            serving.append(_activate(spares.pop(0)))
        spares = [one for one in spares if one.revision == revision]
        if outdated and spares and not self._list("draining"):
            serving.append(_activate(spares.pop(0)))
            _drain(outdated[0], drain_seconds)
            serving.remove(outdated[0])
        if not self.num_wanted:
            self._leave(drain_seconds)
            return 0
        num_reserve = sum(one.revision == revision for one in self._list("loading", "spare"))
        num_missing = max(0, self.num_wanted - len(serving)) + 1 - num_reserve
        return max(0, num_missing) if time.monotonic() >= self._next_start else 0

    def note_loaded(self) -> None:
        self._num_failed = 0

    def note_failure(self) -> None:
        """Record that a process ended before it was loaded."""
        self._num_failed += 1
        pause = FIRST_PAUSE * 2.0 ** min(self._num_failed - 1, 16)
        self._next_start = time.monotonic() + min(LONGEST_PAUSE, pause)

    def upgrade(self) -> None:
        """Stop what is loading. `advance` does the rest, with another revision. The spare stays until a process of that
        revision is loaded, because one that serves may die before, or the new code may not load."""
        self.note_loaded()
        self._next_start = 0.0
        for process in self._list("loading"):
            process.kill()

    def _leave(self, drain_seconds: float) -> None:
        for process in self._list("serving"):
            _drain(process, drain_seconds)
        for process in self._list("loading", "spare"):
            process.kill()

    def _list(self, *phases: str) -> list[FrontEndProcess]:
        return [process for process in self.processes if process.phase in phases]


def _activate(process: FrontEndProcess) -> FrontEndProcess:
    process.phase = "serving"
    process.send(Activate())
    return process


def _drain(process: FrontEndProcess, seconds: float) -> None:
    process.phase = "draining"
    process.send(Drain(seconds))


class LocalHost(FrontEndHost):
    """The server's own host."""

    name = None
    has_own_clock = False

    def __init__(self, num_wanted: int, server_socket: str, listener: socket.socket) -> None:
        super().__init__(num_wanted, server_socket)
        self._listener = listener

    def launch(self, number: int, revision: int) -> FrontEndProcess:
        return LocalFrontEnd(number, revision, self._listener)
