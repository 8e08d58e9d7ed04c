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
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import msgspec
import zmq

from serve_llm.engine.errors import ASK_LOG, BY_NAME, HINTS, EngineError, PeerLost, RankFailed, ServeError
from serve_llm.engine.execute import control
from serve_llm.engine.parallel.encrypted import BEAT_SECONDS, LOST_SECONDS, PING, Endpoint, send

logger = logging.getLogger(__name__)

END_SECONDS = 10.0  # for a last look at the ranks
POLL_SECONDS = 0.1  # between two looks at whether a rank's process still runs
STOPPED_BEATS = 5  # looks in a row, a second apart, at which a rank's process is stopped: then it has failed
SETTLE_SECONDS = 0.3  # after the first sign of a failure, for the cause to arrive behind its consequences
START_SECONDS = 300.0  # for a process to start and import torch, on a busy machine
LOSS_SECONDS = LOST_SECONDS + 2 * BEAT_SECONDS  # until the loss of another host is known

T = TypeVar("T", control.Hello, control.Wired, control.Joined, control.Loaded, control.Ready)


class Launched(Protocol):
    """Ranks, as whoever started them sees them."""

    def ended(self) -> Mapping[int, str | ServeError]:
        """How each rank that is gone ended, such as "signal SIGKILL", or the error that says all. Quick; called again
        and again."""

    def where(self, rank: int) -> str:
        """Such as "host abc, pid 123"."""

    def state(self, rank: int) -> str:
        """What a silent rank's process does: "stopped", "running", "waiting", or "" if that cannot be seen."""

    def serve(self) -> None:
        """The engine is ready."""

    def end(self, cause: str = "") -> None:
        """End all ranks that still run, and wait for that. cause: why, unless all is in order. Idempotent."""


class Roster:
    """All ranks of one executor. Starts them at once; use `gather` in one thread, then `watch`."""

    def __init__(
        self,
        size: int,
        launch: Callable[[str], Launched],
        endpoint: Endpoint | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """launch: starts the ranks, which will connect to the given URL. endpoint: where they come from several hosts;
        closed with this. start_seconds: limit for a rank to come up."""
        self.size = size
        self.began = time.perf_counter()
        self.endpoint = endpoint
        self.start_seconds = start_seconds
        self._directory = tempfile.mkdtemp(prefix="serve-llm-ranks-")  # mode 700: only this user reaches the socket
        self._socket: zmq.Socket[bytes]
        if endpoint is None:
            self._socket, url = zmq.Context.instance().socket(zmq.ROUTER), f"ipc://{self._directory}/control"
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(url)
        else:
            self._socket, url = endpoint.listen()
        self._identities: dict[int, bytes] = {}
        self._alive: dict[int, bytes] = {}  # connections that tell whether their rank is there
        self._next_beat = 0.0
        self._stopped: dict[int, int] = {}  # rank -> looks in a row
        self._said: dict[int, dict[type, control.FromRank]] = {rank: {} for rank in range(size)}
        self._failures: dict[int, ServeError] = {}  # in the order in which they were noticed
        self._without_words: set[int] = set()  # those of whose failure only the process's end is known
        self.failure: ServeError | None = None
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._launched = launch(url)

    def send(self, rank: int, message: control.ToRank) -> None:
        """Only to a rank that has said Hello."""
        send(self._socket, self._identities[rank], control.encode(message))  # one that is gone is found by `gather`

    def gather(self, kind: type[T], seconds: float, ranks: Iterable[int] | None = None) -> list[T]:
        """Wait until every rank, or every one of `ranks`, has said this; in their order.

        Raises the first cause as soon as a rank fails, and EngineError naming those that have not said it in time.
        """
        deadline = time.monotonic() + seconds
        wanted = list(range(self.size) if ranks is None else ranks)
        found: dict[int, T] = {}
        while len(found) < len(wanted):
            self._look(POLL_SECONDS)
            if self._failures:
                self.failure = self._settle()
                raise self.failure
            messages = ((rank, self._said[rank].get(kind)) for rank in wanted)
            found = {rank: message for rank, message in messages if isinstance(message, kind)}
            if len(found) < len(wanted) and time.monotonic() > deadline:
                late = [self._who(rank) for rank in wanted if rank not in found]
                raise EngineError(f"after {seconds:.0f} s still {self._phase(kind)}: {'; '.join(late)}")
        if kind is control.Hello:  # all are connected, so the socket needs no name any more: nothing is left of it
            shutil.rmtree(self._directory, ignore_errors=True)
        return [found[rank] for rank in wanted]

    def _phase(self, awaited: type[T]) -> str:
        """What ranks do that have not said `awaited` yet."""
        kinds = list(control.PHASES)
        return control.PHASES[kinds[kinds.index(awaited) - 1]].removeprefix("while ")

    def watch(self, on_failure: Callable[[], None]) -> None:
        """From now on a thread notices failures: it sets `failure`, then calls on_failure."""

        def run() -> None:
            try:
                while not self._closing.is_set() and self.failure is None:
                    self._look(POLL_SECONDS)
                    if self._failures and not self._closing.is_set():
                        self.fail(self._settle())
                        on_failure()
            except Exception as error:  # unnoticed, it would leave nobody who notices a rank's end
                logger.exception("watching the ranks failed")
                self.fail(EngineError(f"watching the ranks failed: {type(error).__name__}: {error}"))
                on_failure()
            if self.endpoint is None:
                self._socket.close()  # by the thread that used it last

        self._watcher = threading.Thread(target=run, name="watch ranks", daemon=True)
        self._watcher.start()

    def serve(self) -> None:
        """Tell whoever started ranks that the engine is ready."""
        self._launched.serve()

    def fail(self, error: ServeError) -> None:
        """The first failure stays."""
        if self.failure is None:
            logger.error("%s", error)
            self.failure = error
        self._failed.set()

    def cause(self) -> ServeError:
        """Why ranks have gone, known a moment after that was noticed in another way."""
        self._failed.wait(LOSS_SECONDS + 5)
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

    def lost(self, ranks: Iterable[int]) -> RankFailed:
        """The failure of a step that could not be sent."""
        named = "; ".join(self._who(rank) for rank in ranks)
        return RankFailed(f"{named}: the connection for steps is lost, by the network or a stop of more than seconds")

    def close(self, cause: BaseException | None = None) -> None:
        """End all ranks. cause: why, if not for a failure of theirs nor in order. Idempotent."""
        self._closing.set()
        self._launched.end(str(self.failure or cause or ""))
        if self._watcher is not None:
            self._watcher.join(END_SECONDS)
        self._socket.close()
        if self.endpoint is not None:
            self.endpoint.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _look(self, seconds: float) -> None:
        """Take what ranks say, waiting for so long, and note who has ended."""
        ended = self._launched.ended()  # before its last words are read
        timeout = 0 if ended else int(seconds * 1000)
        while self._socket.poll(timeout):
            identity, *frames = self._socket.recv_multipart()
            timeout = 0
            try:
                self._take(identity, control.decode_from_rank(b"".join(frames)))
            except msgspec.DecodeError:
                logger.warning("ignored a message that no rank of this version sends")
        for rank, how in (self._beat() | dict(ended)).items():
            if isinstance(how, ServeError):
                self._failures.setdefault(rank, how)
            elif rank not in self._failures:
                text = f"{self._who(rank)} died {self._doing(rank)} by {how}; {HINTS.get(how, ASK_LOG)}"
                self._failures[rank] = RankFailed(text)
                self._without_words.add(rank)

    def _beat(self) -> dict[int, str | ServeError]:
        """Once a second: ranks whose connection is gone, among those that said Alive, and ranks that are stopped."""
        if time.monotonic() < self._next_beat:
            return {}
        self._next_beat = time.monotonic() + BEAT_SECONDS
        lost = [rank for rank, peer in self._alive.items() if not send(self._socket, peer, PING)]
        stopped = [rank for rank in range(self.size) if self._launched.state(rank) == "stopped"]
        self._stopped = {rank: self._stopped.get(rank, 0) + 1 for rank in stopped}
        found: dict[int, str | ServeError] = {
            rank: RankFailed(f"{self._who(rank)} is stopped {self._doing(rank)}")
            for rank, looks in self._stopped.items()
            if looks >= STOPPED_BEATS
        }
        loss = f"loss of its host: no sign of life for {LOST_SECONDS:.0f} s, or its process is gone"
        return found | dict.fromkeys(lost, loss)

    def _take(self, identity: bytes, message: control.FromRank) -> None:
        if isinstance(message, control.Hello) and message.rank in self._said:
            self._identities[message.rank] = identity
        if isinstance(message, control.Alive):
            if message.rank in self._said:
                self._alive[message.rank] = identity
            return
        rank = next((rank for rank, known in self._identities.items() if known == identity), None)
        if rank is None:
            logger.warning("ignored a message from a process that is no rank")
            return
        if isinstance(message, control.Failed):
            kind = BY_NAME.get(message.kind, RankFailed)
            what = message.message if message.kind in BY_NAME else f"{message.kind}: {message.message}"
            if rank not in self._failures or rank in self._without_words:  # last words say more than how it ended
                self._without_words.discard(rank)
                self._failures[rank] = kind(f"{self._who(rank)} failed {message.phase}: {what}")
        else:
            self._said[rank][type(message)] = message

    def _settle(self) -> ServeError:
        """The first cause among the failures: consequences may overtake it on their way here."""
        began = time.monotonic()
        while (len(self._failures) < self.size or self._without_words) and not self._closing.is_set():
            # That a peer is lost is never the first cause; that a host is lost is known only after a while.
            limit = SETTLE_SECONDS if self._causes() or self.endpoint is None else LOSS_SECONDS
            if time.monotonic() > began + limit:
                break
            self._look(POLL_SECONDS)
            time.sleep(0.01)
        return (self._causes() or list(self._failures.values()))[0]

    def _causes(self) -> list[ServeError]:
        return [error for error in self._failures.values() if not isinstance(error, PeerLost)]

    def _doing(self, rank: int) -> str:
        return control.PHASES[next(reversed(self._said[rank]), None)]

    def _who(self, rank: int) -> str:
        return f"rank {rank} ({self._launched.where(rank)})"
