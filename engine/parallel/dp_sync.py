"""Synchronises the steps of data-parallel engines that share experts: each of them holds some of the experts.

All engines run the same steps, numbered from 1, and wait for each other in each layer with experts. An engine with work
enters the next step and sends its number to the others, which enter it as well, with or without work. An engine without
work never enters a step first, so no step runs while all are idle.

Numbers only grow and each message holds one, so the order in which an engine reads messages does not matter. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from serve_llm.common.errors import EngineError

RECONNECT_MS = 20  # between two attempts to find an engine that starts later
CHECK_SECONDS = 0.2


class _EngineJoined(msgspec.Struct, tag=True, frozen=True):
    engine: int
    value: bytes


class _Entered(msgspec.Struct, tag=True, frozen=True):
    step: int


class _Left(msgspec.Struct, tag=True, frozen=True):
    engine: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_EngineJoined | _Entered | _Left).decode


class DPStepSync:
    """For use in a single thread. `socket` becomes readable when another engine has sent a message."""

    def __init__(self, directory: Path, engine: int, engines: int) -> None:
        """directory: for the sockets; the same for all engines, accessible to this user only. engine: index of this
        one."""
        self.engine = engine
        self.engines = engines
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.bind(_address(directory, engine))
        self._others: list[zmq.Socket[bytes]] = []
        for other in range(engines):
            if other != engine:
                socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
                socket.set_hwm(0)  # the server kills an engine that stops reading
                socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
                socket.setsockopt(zmq.LINGER, 1000)  # ms, to deliver the last message
                socket.connect(_address(directory, other))
                self._others.append(socket)
        self._joined: dict[int, bytes] = {}
        self._left: set[int] = set()
        self._entered = 0  # number of this engine's newest step
        self._newest = 0  # number of the newest step of any engine

    def gather(self, value: bytes, seconds: float, check: Callable[[], object] = lambda: None) -> list[bytes]:
        """Exchange a value. Returns every engine's value in order, once all have called this. Call it once, before the
        first step.

        check: called every CHECK_SECONDS, to raise failures. Raises EngineError after `seconds`, naming the missing
        engines."""
        self._joined[self.engine] = value
        self._broadcast(_EngineJoined(self.engine, value))
        deadline = time.monotonic() + seconds
        while missing := [engine for engine in range(self.engines) if engine not in self._joined]:
            left = max(0.0, deadline - time.monotonic())
            if not self._receive(min(left, CHECK_SECONDS)) and left == 0.0:
                late = " and ".join(map(str, missing))
                raise EngineError(f"after {seconds:.0f} s still waiting for engine {late}")
            check()
        return [self._joined[engine] for engine in range(self.engines)]

    def is_behind(self) -> bool:
        """Whether another engine has entered a step that this one has not."""
        self._receive(0.0)
        return self._entered < self._newest

    def enter(self) -> None:
        """Announce that this engine enters its next step."""
        self._entered += 1
        if self._entered > self._newest:
            self._newest = self._entered
            self._broadcast(_Entered(self._entered))

    def leave(self) -> None:
        """Announce that this engine has no more work of its own; it still follows the steps of others."""
        self._left.add(self.engine)
        self._broadcast(_Left(self.engine))

    def follow(self) -> bool:
        """After `leave`: wait until there is another step to run (True), or until it is certain that there is none
        (False)."""
        # An engine announces the steps that it enters before it announces that it leaves.
        while not self.is_behind() and len(self._left) < self.engines:
            self._receive(None)
        return self._entered < self._newest

    def _broadcast(self, message: _EngineJoined | _Entered | _Left) -> None:
        encoded = _encode(message)
        for socket in self._others:
            socket.send(encoded)

    def _receive(self, seconds: float | None) -> bool:
        """Read all messages, waiting up to `seconds` for the first one (None: no limit). Returns whether there were
        any."""
        timeout = None if seconds is None else int(seconds * 1000)
        received = False
        while self.socket.poll(0 if received else timeout):
            received = True
            message = _decode(self.socket.recv())
            if isinstance(message, _Entered):
                self._newest = max(self._newest, message.step)
            elif isinstance(message, _Left):
                self._left.add(message.engine)
            else:
                self._joined[message.engine] = message.value
        return received

    def close(self) -> None:
        for socket in (self.socket, *self._others):
            socket.close()


def _address(directory: Path, engine: int) -> str:
    return f"ipc://{directory}/steps-{engine}"
