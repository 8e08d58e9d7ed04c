"""The workers of one executor: starts them, waits for their messages, and finds the first cause when one fails.

Independent of models and steps, and of how workers are started, which is up to a `LaunchedWorkers`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Protocol, TypeVar

from serve_llm.common.curve_zmq import BEAT_SECONDS, LOST_SECONDS, Endpoint
from serve_llm.common.errors import EngineError, HostLost, RankFailed, ServeError
from serve_llm.common.messages import Failed
from serve_llm.common.open_files import check_limit
from serve_llm.common.types import EPLBStats
from serve_llm.engine.distributed import messages
from serve_llm.engine.distributed.control_socket import ControlSocket
from serve_llm.engine.distributed.rank_failures import RankFailures

logger = logging.getLogger(__name__)

END_SECONDS = 10.0  # time for the watching thread to end
POLL_SECONDS = 0.1  # between two checks of the workers' processes
STOPPED_BEATS = 5  # a process found stopped in this many successive checks, a second apart, has failed
SETTLE_SECONDS = 0.3  # wait after the first sign of a failure, because its cause may arrive after its consequences
FILES_PER_RANK = 4  # control connection, steps or heartbeat, parent-death pipe or ring, and one to spare
MAX_NAMES = 8  # ranks that an error describes; with 1,024 ranks, the line would have 70,000 characters
START_SECONDS = 300.0  # time for a process to start and import torch on a busy machine
LOSS_SECONDS = LOST_SECONDS + 2 * BEAT_SECONDS  # time to detect the loss of another host

T = TypeVar(
    "T", messages.WorkerHello, messages.ChannelsReady, messages.GroupsReady, messages.LoadDone, messages.CacheReady
)


class LaunchedWorkers(Protocol):
    """The launcher's interface to its worker processes."""

    def find_ended(self) -> Mapping[int, str | ServeError]:
        """How each dead rank ended, such as "signal SIGKILL", or HostLost("loss of its node"), or an error with a
        complete message. Must return quickly."""

    def describe_place(self, rank: int) -> str:
        """Return the place of a rank, such as "host abc, pid 123"."""

    def state(self, rank: int) -> str:
        """State of the rank's process: "stopped", "running", "waiting", or "" if unknown."""

    def serve(self) -> None:
        """Called when the engine is ready."""

    def end(self, cause: str = "") -> None:
        """Stop all ranks and wait until they are gone. cause: "" on an orderly shutdown. Idempotent."""


class _StoppedProcesses:
    """Counts in how many successive checks each rank's process was stopped."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}

    def update(self, stopped: Iterable[int]) -> list[int]:
        """Record which ranks are stopped now. Returns those that have been stopped for too long."""
        self._looks = {rank: self._looks.get(rank, 0) + 1 for rank in stopped}
        return [rank for rank, looks in self._looks.items() if looks >= STOPPED_BEATS]


class WorkerGroup:
    """All workers of one executor. Call `gather` in one thread, then `watch`."""

    def __init__(
        self,
        size: int,
        launch: Callable[[str], LaunchedWorkers],
        endpoint: Endpoint | None = None,
        start_seconds: float = START_SECONDS,
        directory: Path | None = None,
    ) -> None:
        """launch: starts the workers, which connect to the given URL. endpoint: for workers on several hosts; `close`
        closes it. start_seconds: limit for a worker to send WorkerHello. directory: see `ControlSocket`."""
        check_limit(FILES_PER_RANK * size, f"{size} ranks")
        self.size = size
        self.began = time.perf_counter()
        self.endpoint = endpoint
        self.start_seconds = start_seconds
        self.failure: ServeError | None = None
        self.eplb_stats: EPLBStats | None = None  # sum over ranks, replaced when a rank has placed experts
        self._socket = ControlSocket(size, endpoint, directory)
        self._received: dict[int, dict[type, messages.FromRank]] = {rank: {} for rank in range(size)}
        self._failures = RankFailures()
        self._stopped = _StoppedProcesses()
        self._next_beat = 0.0  # monotonic
        self._has_failed = threading.Event()
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._launched = launch(self._socket.url)

    def send(self, rank: int, message: messages.ToRank) -> None:
        """Send to a rank that has sent WorkerHello; `gather` notices if it is gone."""
        self._socket.send(rank, message)

    def gather(self, kind: type[T], seconds: float, ranks: Iterable[int] | None = None) -> list[T]:
        """Wait for a message of this kind from every rank, or every one of `ranks`; in their order.

        Raises the first cause as soon as a rank fails, or an EngineError that names the late ranks.
        """
        deadline = time.monotonic() + seconds
        awaited = list(range(self.size) if ranks is None else ranks)
        while True:
            self._update(POLL_SECONDS)
            if self._failures:
                self.failure = self._find_first_cause()
                raise self.failure
            late = [rank for rank in awaited if kind not in self._received[rank]]
            if not late:
                break
            if time.monotonic() > deadline:
                names = self._describe_some(late)
                raise EngineError(f"after {seconds:.0f} s still {_phase_before(kind)}: {names}")
        if kind is messages.WorkerHello and ranks is None:
            self._socket.remove_path()
        gathered = (self._received[rank][kind] for rank in awaited)
        return [message for message in gathered if isinstance(message, kind)]

    def check(self) -> None:
        """Raise the first cause if a rank has failed. For use between calls of `gather`."""
        self._update(0.0)
        if self._failures:
            self.failure = self._find_first_cause()
            raise self.failure

    def watch(self, on_failure: Callable[[], None]) -> None:
        """Start a thread that detects failures: it sets `failure`, then calls `on_failure`."""

        def run() -> None:
            try:
                while not self._closing.is_set() and self.failure is None:
                    self._update(POLL_SECONDS)
                    if self._failures and not self._closing.is_set():
                        self.fail(self._find_first_cause())
                        on_failure()
            except Exception as error:
                logger.exception("watching the ranks failed")
                self.fail(EngineError(f"watching the ranks failed: {type(error).__name__}: {error}"))
                on_failure()
            self._socket.close_after_watching()  # in the thread that used it last

        self._watcher = threading.Thread(target=run, name="watch ranks", daemon=True)
        self._watcher.start()

    def serve(self) -> None:
        """Tell the launcher that the engine is ready."""
        self._launched.serve()

    def fail(self, error: ServeError) -> None:
        """Set the failure unless there is one."""
        if self.failure is None:
            logger.error("%s", error)
            self.failure = error
        self._has_failed.set()

    def cause(self) -> ServeError:
        """Find out why the ranks are gone. Waits for the watching thread if their end was detected elsewhere."""
        self._has_failed.wait(LOSS_SECONDS + 5)
        return self.failure or EngineError("the ranks have ended")

    def build_silence_error(self, seconds: float) -> RankFailed:
        """Build the error of a step without a result. Names the ranks that the others wait for, if known."""
        states = {rank: self._launched.state(rank) for rank in range(self.size)}
        silent: list[int] = []
        state = ""
        for state in ("stopped", "running", "waiting", ""):
            silent = [rank for rank in states if states[rank] == state]
            if silent:
                break
        names = self._describe_some(silent)
        state_text = f", {state}" if state else ""
        return RankFailed(f"{names}{state_text}: no answer {self._phase(silent[0])} for {seconds:.0f} s")

    def build_loss_error(self, ranks: Iterable[int]) -> RankFailed:
        """Build the error of a step that could not be sent to these ranks."""
        names = self._describe_some(list(ranks))
        return RankFailed(
            f"{names}: the connection for steps is lost: the network failed, or a process stood still for seconds"
        )

    def close(self, cause: BaseException | None = None) -> None:
        """Stop all ranks. cause: the reason, unless a rank has failed or the shutdown is orderly. Idempotent."""
        self._closing.set()
        self._launched.end(str(self.failure or cause or ""))
        if self._watcher is not None:
            self._watcher.join(END_SECONDS)
        self._socket.close()
        if self.endpoint is not None:
            self.endpoint.close()

    def _update(self, seconds: float) -> None:
        """Receive messages, waiting up to `seconds` for the first, and record which ranks have failed."""
        ended = (
            self._launched.find_ended()
        )  # before receiving, so that the last message of a process that has ended is already here
        for rank, message in self._socket.receive(0.0 if ended else seconds):
            if isinstance(message, Failed):
                self._failures.add_message(rank, message, self._describe(rank), self._phase(rank))
            else:
                self._received[rank][type(message)] = message
            if isinstance(message, messages.ExpertsPlaced):
                self.eplb_stats = self._sum_eplb_stats()
        self._check_liveness()
        for rank, how in ended.items():
            if isinstance(how, str | HostLost):
                self._failures.add_end(rank, how, self._describe(rank), self._phase(rank))
            else:
                self._failures.add_error(rank, how)

    def _sum_eplb_stats(self) -> EPLBStats:
        received = (by_kind.get(messages.ExpertsPlaced) for by_kind in self._received.values())
        return reduce(EPLBStats.add, [one.stats for one in received if isinstance(one, messages.ExpertsPlaced)])

    def _check_liveness(self) -> None:
        """Once a second, look for stopped processes and lost heartbeat connections."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + BEAT_SECONDS
        stopped = [rank for rank in range(self.size) if self._launched.state(rank) == "stopped"]
        for rank in self._stopped.update(stopped):
            self._failures.add_error(rank, RankFailed(f"{self._describe(rank)} is stopped {self._phase(rank)}"))
        loss = f"loss of its host: no sign of life for {LOST_SECONDS:.0f} s, or its process is gone"
        for rank in self._socket.find_lost():
            self._failures.add_end(rank, loss, self._describe(rank), self._phase(rank))

    def _find_first_cause(self) -> ServeError:
        """Wait a moment for the cause, because its consequences may arrive first."""
        began = time.monotonic()
        while not self._failures.is_complete(self.size) and not self._closing.is_set():
            # A lost peer is never the first cause, and the loss of a host is detected late.
            only_lost_peers = self.endpoint is not None and not self._failures.find_causes()
            if time.monotonic() > began + (LOSS_SECONDS if only_lost_peers else SETTLE_SECONDS):
                break
            self._update(POLL_SECONDS)
            time.sleep(0.01)
        return self._failures.first_cause()

    def _phase(self, rank: int) -> str:
        return messages.PHASES[next(reversed(self._received[rank]), None)]

    def _describe_some(self, ranks: Sequence[int]) -> str:
        """Describe the first ranks, and how many others there are."""
        names = "; ".join(map(self._describe, ranks[:MAX_NAMES]))
        others = len(ranks) - MAX_NAMES
        return f"{names}; and {others} other{'s' if others > 1 else ''}" if others > 0 else names

    def _describe(self, rank: int) -> str:
        return f"rank {rank} ({self._launched.describe_place(rank)})"


def _phase_before(awaited: type[T]) -> str:
    """Describe the state of ranks that have not sent `awaited` yet."""
    kinds = list(messages.PHASES)
    return messages.PHASES[kinds[kinds.index(awaited) - 1]].removeprefix("while ")
