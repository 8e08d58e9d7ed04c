"""Engines of one host that make their steps together, because each of them holds some of the experts of all.

All make the same steps, numbered from 1: in each layer with experts they wait for each other. Whoever has work enters
the next step and tells the others its number; they enter it as well, with work of their own or without. Nobody enters a
step without work that nobody else has entered, so when all are idle, all wait, and no step is made.

Numbers only grow and each message holds one, so it does not matter which of them an engine reads, in which order, or
what it did when they came. Knows nothing of models; no torch.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from serve_llm.engine.errors import EngineError

RECONNECT_MS = 20  # until an engine that starts later is found


class _Joined(msgspec.Struct, tag=True, frozen=True):
    engine: int
    value: bytes


class _Entered(msgspec.Struct, tag=True, frozen=True):
    step: int


class _Left(msgspec.Struct, tag=True, frozen=True):
    engine: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Joined | _Entered | _Left).decode


class Steps(Protocol):
    """What the loop asks before it makes a step."""

    def is_behind(self) -> bool:
        """Whether another engine has entered a step that this one has not."""

    def enter(self) -> None:
        """This engine makes its next step, now."""

    def leave(self) -> None:
        """This engine will have no work any more, but makes the steps of others."""

    def follow(self) -> bool:
        """After `leave`: waits until there is another step to make (True), or there will be none (False)."""


class Apart:
    """The `Steps` of an engine that makes its own."""

    def is_behind(self) -> bool:
        return False

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def follow(self) -> bool:
        return False


class Lockstep:
    """See `Steps`. To be used in one thread; `socket` can be read when another engine has said something."""

    def __init__(self, directory: Path, engine: int, engines: int) -> None:
        """directory: the same for all engines, of this user alone, for their sockets. engine: which of them this is."""
        self.engine, self.engines = engine, engines
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.bind(_address(directory, engine))
        self._others: list[zmq.Socket[bytes]] = []
        for other in range(engines):
            if other != engine:
                socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
                socket.set_hwm(0)  # an engine that reads nothing is ended by whoever watches it
                socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
                socket.setsockopt(zmq.LINGER, 1000)  # ms, for the last message
                socket.connect(_address(directory, other))
                self._others.append(socket)
        self._joined: dict[int, bytes] = {}
        self._left: set[int] = set()
        self._entered = self._newest = 0  # steps: of this engine, and of any

    def gather(self, value: bytes, seconds: float) -> list[bytes]:
        """Every engine's value in their order, once all have called this. For one time, before the first step.
        Raises EngineError naming those that have not, after so many seconds."""
        self._joined[self.engine] = value
        self._tell(_Joined(self.engine, value))
        deadline = time.monotonic() + seconds
        while missing := [engine for engine in range(self.engines) if engine not in self._joined]:
            if not self._hear(max(0.0, deadline - time.monotonic())):
                late = " and ".join(map(str, missing))
                raise EngineError(f"after {seconds:.0f} s still waiting for engine {late}")
        return [self._joined[engine] for engine in range(self.engines)]

    def is_behind(self) -> bool:
        self._hear(0.0)
        return self._entered < self._newest

    def enter(self) -> None:
        self._entered += 1
        if self._entered > self._newest:
            self._newest = self._entered
            self._tell(_Entered(self._entered))

    def leave(self) -> None:
        self._left.add(self.engine)
        self._tell(_Left(self.engine))

    def follow(self) -> bool:
        # What an engine enters it says before it says that it leaves.
        while not self.is_behind() and len(self._left) < self.engines:
            self._hear(None)
        return self._entered < self._newest

    def _tell(self, message: _Joined | _Entered | _Left) -> None:
        encoded = _encode(message)
        for socket in self._others:
            socket.send(encoded)

    def _hear(self, seconds: float | None) -> bool:
        """Take all that others have said, waiting so long for the first (None: for ever). Whether there was any."""
        timeout = None if seconds is None else int(seconds * 1000)
        heard = False
        while self.socket.poll(0 if heard else timeout):
            heard = True
            message = _decode(self.socket.recv())
            if isinstance(message, _Entered):
                self._newest = max(self._newest, message.step)
            elif isinstance(message, _Left):
                self._left.add(message.engine)
            else:
                self._joined[message.engine] = message.value
        return heard

    def close(self) -> None:
        for socket in (self.socket, *self._others):
            socket.close()


def _address(directory: Path, engine: int) -> str:
    return f"ipc://{directory}/steps-{engine}"
