"""Who the ranks of an executor are, what they last said, and the first cause when one of them fails.

The engine's end of `control`, over a ROUTER socket. Knows nothing of models or steps, nor how ranks were started: that
is the business of a `Launched`.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import zmq

from serve_llm.engine.errors import BY_NAME, EngineError, PeerLost, RankFailed, ServeError
from serve_llm.engine.execute import control

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between two looks at whether a rank's process still runs
SETTLE_SECONDS = 0.3  # after the first sign of a failure, for the cause to arrive behind its consequences

T = TypeVar("T", control.Hello, control.Joined, control.Loaded, control.Ready)


class Launched(Protocol):
    """Ranks, as whoever started them sees them."""

    def ended(self) -> Mapping[int, str]:
        """How each rank that is gone ended, such as "signal SIGKILL". Quick; called again and again."""

    def where(self, rank: int) -> str:
        """Such as "host abc, pid 123"."""

    def state(self, rank: int) -> str:
        """What a silent rank's process does: "stopped", "running", "waiting", or "" if that cannot be seen."""

    def end(self) -> None:
        """End all ranks that still run, and wait for that. Idempotent."""


class Roster:
    """All ranks of one executor. Starts them at once; use `gather` in one thread, then `watch`."""

    def __init__(self, size: int, launch: Callable[[str], Launched]) -> None:
        """launch: starts the ranks, which will connect to the given address."""
        self.size = size
        self.began = time.perf_counter()
        self._directory = tempfile.mkdtemp(prefix="serve-llm-ranks-")  # mode 700: only this user reaches the socket
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{self._directory}/control"
        self._socket.bind(address)
        self._identities: dict[int, bytes] = {}
        self._said: dict[int, dict[type, control.FromRank]] = {rank: {} for rank in range(size)}
        self._failures: dict[int, ServeError] = {}  # in the order in which they were noticed
        self.failure: ServeError | None = None
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._launched = launch(address)

    def send(self, rank: int, message: control.ToRank) -> None:
        """Only to a rank that has said Hello."""
        self._socket.send_multipart([self._identities[rank], control.encode(message)])

    def gather(self, kind: type[T], seconds: float) -> list[T]:
        """Wait until every rank has said this; in rank order.

        Raises the first cause as soon as a rank fails, and EngineError naming those that have not said it in time.
        """
        deadline = time.monotonic() + seconds
        found: dict[int, T] = {}
        while len(found) < self.size:
            self._look(POLL_SECONDS)
            if self._failures:
                raise self._settle()
            messages = ((rank, said.get(kind)) for rank, said in self._said.items())
            found = {rank: message for rank, message in messages if isinstance(message, kind)}
            if len(found) < self.size and time.monotonic() > deadline:
                late = [self._who(rank) for rank in range(self.size) if rank not in found]
                raise EngineError(f"after {seconds:.0f} s still {self._phase(kind)}: {'; '.join(late)}")
        if kind is control.Hello:  # all are connected, so the socket needs no name any more: nothing is left of it
            shutil.rmtree(self._directory, ignore_errors=True)
        return [found[rank] for rank in range(self.size)]

    def _phase(self, awaited: type[T]) -> str:
        """What ranks do that have not said `awaited` yet."""
        kinds = list(control.PHASES)
        return control.PHASES[kinds[kinds.index(awaited) - 1]].removeprefix("while ")

    def watch(self, on_failure: Callable[[], None]) -> None:
        """From now on a thread notices failures: it sets `failure`, then calls on_failure."""

        def run() -> None:
            while not self._closing.is_set() and self.failure is None:
                self._look(POLL_SECONDS)
                if self._failures and not self._closing.is_set():
                    self.fail(self._settle())
                    on_failure()
            self._socket.close()  # by the thread that used it last

        self._watcher = threading.Thread(target=run, name="watch ranks", daemon=True)
        self._watcher.start()

    def fail(self, error: ServeError) -> None:
        """The first failure stays."""
        if self.failure is None:
            logger.error("%s", error)
            self.failure = error
        self._failed.set()

    def cause(self) -> ServeError:
        """Why ranks have gone, known a moment after that was noticed in another way."""
        self._failed.wait(5)
        return self.failure or EngineError("the ranks have ended")

    def silence(self, seconds: float) -> RankFailed:
        """The failure of a step without an answer: names whom the others wait for, if that can be seen."""
        states = {rank: self._launched.state(rank) for rank in range(self.size)}
        for culprit in ("stopped", "running", "waiting", ""):
            silent = [rank for rank, state in states.items() if state == culprit]
            if silent:
                break
        named = "; ".join(self._who(rank) for rank in silent)
        what = f", {culprit}" if culprit else ""
        return RankFailed(f"{named}{what}: no answer {self._doing(silent[0])} for {seconds:.0f} s")

    def close(self) -> None:
        """End all ranks. Idempotent."""
        self._closing.set()
        self._launched.end()
        if self._watcher is not None:
            self._watcher.join()
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _look(self, seconds: float) -> None:
        """Take what ranks say, waiting for so long, and note who has ended."""
        ended = self._launched.ended()  # before its last words are read
        timeout = 0 if ended else int(seconds * 1000)
        while self._socket.poll(timeout):
            identity, frame = self._socket.recv_multipart()
            self._take(identity, control.decode_from_rank(frame))
            timeout = 0
        for rank, how in ended.items():
            if rank not in self._failures:
                hint = "; the system may be out of memory" if "SIGKILL" in how else ""
                text = f"{self._who(rank)} died {self._doing(rank)} by {how}{hint}"
                self._failures[rank] = RankFailed(text)

    def _take(self, identity: bytes, message: control.FromRank) -> None:
        if isinstance(message, control.Hello) and message.rank in self._said:
            self._identities[message.rank] = identity
        rank = next((rank for rank, known in self._identities.items() if known == identity), None)
        if rank is None:
            logger.warning("ignored a message from a process that is no rank")
            return
        if isinstance(message, control.Failed):
            kind = BY_NAME.get(message.kind, RankFailed)
            what = message.message if message.kind in BY_NAME else f"{message.kind}: {message.message}"
            self._failures.setdefault(rank, kind(f"{self._who(rank)} failed {message.phase}: {what}"))
        else:
            self._said[rank][type(message)] = message

    def _settle(self) -> ServeError:
        """The first cause among the failures: consequences may overtake it on their way here."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and len(self._failures) < self.size:
            self._look(min(left, POLL_SECONDS))
            time.sleep(0 if self._closing.is_set() else 0.01)
        causes = [error for error in self._failures.values() if not isinstance(error, PeerLost)]
        return (causes or list(self._failures.values()))[0]

    def _doing(self, rank: int) -> str:
        return control.PHASES[next(reversed(self._said[rank]), None)]

    def _who(self, rank: int) -> str:
        return f"rank {rank} ({self._launched.where(rank)})"
