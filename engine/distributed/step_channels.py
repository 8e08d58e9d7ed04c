"""The step channel, which carries each step to all ranks and each result back: through shared memory on the engine's
host, over encrypted ZeroMQ to ranks on other hosts.

It transports bytes; the executor and the worker program encode and decode them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import zmq

from serve_llm.common.curve_zmq import Endpoint, create_dealer, send
from serve_llm.common.errors import EngineError
from serve_llm.common.splits import name_numbers
from serve_llm.engine.parallel.shm import ChannelClosed, ShmHandle
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer

POLL_SECONDS = 0.1  # between two checks whether the channel has been closed
STEP_SECONDS = 300.0  # limit for the result of a step; a large prompt on a CPU takes many seconds
STEP_FACTOR = 20  # a step may take this many times as long as the longest step so far


class ConnectionLost(ChannelClosed):
    """The step connection to these ranks was lost."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class StepChannel(Protocol):
    """The engine's end."""

    def send(self, message: bytes, seconds: float = STEP_SECONDS, remote_message: bytes | None = None) -> None:
        """Send to all ranks. Raises TimeoutError if they do not accept it in time, ChannelClosed after `close`.

        remote_message: for ranks on other hosts, instead of `message`.
        """

    def receive(self, seconds: float = STEP_SECONDS) -> bytes:
        """Wait for the next result. Raises TimeoutError, and ChannelClosed after `close`."""

    def close(self) -> None:
        """End all waits, here and in the ranks on this host, which then exit. Safe to call from any thread."""


class StepReceiver(Protocol):
    """A rank's end. `receive` and `answer` raise ChannelClosed when the engine has closed the channel."""

    @property
    def ready(self) -> bool:
        """Whether `receive` would return or raise at once."""

    def receive(self) -> bytes:
        """Wait for the next step, without a limit."""

    def answer(self, message: bytes) -> None: ...


class ShmStepChannel:
    """See `StepChannel`: the engine writes the ring `steps`, the rank that samples writes `answers`."""

    def __init__(self, steps: ShmRingBuffer, answers: ShmRingBuffer) -> None:
        self._rings = (steps, answers)
        self._steps = steps.writer()
        self._answers = answers.reader(0)
        self._arrived: deque[bytes] = deque()

    @property
    def handles(self) -> tuple[ShmHandle, ShmHandle]:
        """The handles of the rings for steps and for results."""
        steps, answers = self._rings
        return steps.memory.handle, answers.memory.handle

    def send(self, message: bytes, seconds: float = STEP_SECONDS, remote_message: bytes | None = None) -> None:
        self._steps.send(message, seconds, self._take_answers)

    def _take_answers(self) -> None:
        """Make room for results, because a rank that cannot write its result accepts no step."""
        while self._answers.ready:
            self._arrived.append(self._answers.receive(STEP_SECONDS))

    def receive(self, seconds: float = STEP_SECONDS) -> bytes:
        return self._arrived.popleft() if self._arrived else self._answers.receive(seconds)

    def close(self) -> None:
        for ring in self._rings:
            ring.close()


class ShmStepReceiver:
    """See `StepReceiver`."""

    def __init__(self, steps: ShmRingBuffer, reader: int, answers: ShmRingBuffer | None) -> None:
        self._steps = steps.reader(reader)
        self._answers = answers.writer() if answers is not None else None

    @property
    def ready(self) -> bool:
        return self._steps.ready

    def receive(self) -> bytes:
        return self._steps.receive()

    def answer(self, message: bytes) -> None:
        assert self._answers is not None, "only the rank that samples has answers"
        self._answers.send(message)


class SocketStepChannel:
    """The engine's end for ranks on other hosts: one connection each, all on one socket of the engine's thread."""

    def __init__(self, endpoint: Endpoint, ranks: Sequence[int]) -> None:
        listener, url = endpoint.listen()
        self._socket = listener
        self.url = url
        self._ranks = ranks
        self._peers: dict[int, bytes] = {}
        self._closed = threading.Event()

    def connect(self, seconds: float) -> None:
        """Wait until all ranks are connected. Raises EngineError naming those that are not."""
        deadline = time.monotonic() + seconds
        known = frozenset(self._ranks)
        while len(self._peers) < len(known):
            try:
                peer, rank = self._receive(deadline)
            except TimeoutError:
                missing = name_numbers("rank", set(self._ranks) - set(self._peers))
                raise EngineError(f"{missing} did not open their step channel in {seconds:.0f} s") from None
            if int(rank) in known:
                self._peers[int(rank)] = peer
        # The first stage needs a step first, and a step goes to one rank after the other.
        self._peers = {rank: self._peers[rank] for rank in self._ranks}

    def send(self, message: bytes, seconds: float = STEP_SECONDS) -> None:
        """Send without waiting. Raises ChannelClosed after `close`, and ConnectionLost."""
        if self._closed.is_set():
            raise ChannelClosed("the step channel was closed")
        if lost := [rank for rank, peer in self._peers.items() if not send(self._socket, peer, message)]:
            raise ConnectionLost(f"the step connection to {name_numbers('rank', lost)} is lost", lost)

    def receive(self, seconds: float = STEP_SECONDS) -> bytes:
        return self._receive(time.monotonic() + seconds)[1]

    def _receive(self, deadline: float) -> tuple[bytes, bytes]:
        while not self._closed.is_set():
            if self._socket.poll(int(POLL_SECONDS * 1000)):
                peer, message = self._socket.recv_multipart()
                return peer, message
            if time.monotonic() > deadline:
                raise TimeoutError
        raise ChannelClosed("the step channel was closed")

    def close(self) -> None:
        """End all waits. The endpoint closes the socket."""
        self._closed.set()


class MultiHostStepChannel:
    """See `StepChannel`: ranks on this host by rings, ranks on others by the socket."""

    def __init__(self, local: ShmStepChannel | None, remote: SocketStepChannel, answers_here: bool) -> None:
        """local: None if no rank runs on this host."""
        self._local = local
        self._remote = remote
        self._answers: ShmStepChannel | SocketStepChannel = local if local is not None and answers_here else remote

    def send(self, message: bytes, seconds: float = STEP_SECONDS, remote_message: bytes | None = None) -> None:
        # The network takes longest, so it is first.
        self._remote.send(message if remote_message is None else remote_message)
        if self._local is not None:
            self._local.send(message, seconds)

    def receive(self, seconds: float = STEP_SECONDS) -> bytes:
        return self._answers.receive(seconds)

    def close(self) -> None:
        self._remote.close()
        if self._local is not None:
            self._local.close()


class SocketStepReceiver:
    """See `StepReceiver`: for a rank on another host than the engine. Its launcher ends it when the engine is gone."""

    def __init__(self, url: str, secret: str, rank: int) -> None:
        self._socket = create_dealer(zmq.Context.instance(), url, secret)
        self._socket.connect(url)
        self._socket.send(str(rank).encode())

    @property
    def ready(self) -> bool:
        return bool(self._socket.poll(0))

    def receive(self) -> bytes:
        return self._socket.recv()

    def answer(self, message: bytes) -> None:
        self._socket.send(message)
