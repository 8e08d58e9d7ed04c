"""One front end process, as the server process sees it: talk to it, detect its end, kill it. It runs on this host or on
one that has joined (`server.front_ends.gateway`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from serve_llm.server.front_ends.channel import MessageChannel
from serve_llm.server.front_ends.messages import (
    FromFrontEnd,
    ToFrontEnd,
    compute_protocol,
    decode_from_front_end,
    encode,
)
from serve_llm.server.front_ends.relay import Relay

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 2**28  # the largest messages are log-probabilities of long prompts, some 50 MiB
EXIT_SECONDS = 1.0  # time for a process to exit after closing its channel

Phase = Literal["loading", "spare", "serving", "draining"]


class FrontEndProcess(ABC):
    """A front end process, started by the constructor."""

    pid: int  # on its host; 0 until it is known

    def __init__(self, number: int, revision: int) -> None:
        """number: counts the processes since the server started. revision: of the code with which it was started."""
        self.number = number
        self.revision = revision
        self.phase: Phase = "loading"
        self.num_silent_polls = 0  # polls since its last message
        self.counted = 0  # number of the last CollectCounts that it answered
        self.adapters_version = 0  # version of the adapters that it knows
        self.relay: Relay | None = None  # None until Setup is sent
        self.channel: MessageChannel | None = None  # None until `connect`
        self.has_ended = False
        self._is_abandoned = False

    @property
    def num_open(self) -> int:
        """Generations that have not ended."""
        return 0 if self.relay is None else self.relay.num_open

    @abstractmethod
    async def connect(self, receive: Callable[[FromFrontEnd], None]) -> None:
        """receive: called in the event loop with each message."""

    @abstractmethod
    async def wait(self) -> str:
        """Wait until the process has ended. Returns how it ended."""

    @abstractmethod
    def kill(self) -> None:
        """Idempotent."""

    def send(self, message: ToFrontEnd) -> None:
        """Does nothing before `connect`, and after the process has ended. A process that leaves more than
        MAX_UNREAD_BYTES unread is killed: the engines do not wait for it, so memory would run out."""
        if self.channel is None or self._is_abandoned:
            return
        num_bytes = self.channel.num_unread_bytes
        if num_bytes > MAX_UNREAD_BYTES:
            logger.error("The front end process %d has left %d MiB unread and is killed", self.pid, num_bytes >> 20)
            self.abandon()
        else:
            self.channel.send(encode(message))

    def abandon(self) -> None:
        """Kill it, and drop pending messages. Idempotent."""
        self._is_abandoned = True
        self.kill()
        if self.channel is not None:
            self.channel.abort()


class LocalFrontEnd(FrontEndProcess):
    """A front end on this host. It ends when its channel closes, so it never outlives this process."""

    def __init__(self, number: int, revision: int, listener: socket.socket) -> None:
        """listener: where it will accept connections."""
        super().__init__(number, revision)
        self._process, self._own_end = start_process(listener, compute_protocol())
        self.pid = self._process.pid

    async def connect(self, receive: Callable[[FromFrontEnd], None]) -> None:
        channel = create_channel(receive)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=self._own_end)
        self.channel = channel

    async def wait(self) -> str:
        assert self.channel is not None, "connect() comes first"
        await self.channel.closed.wait()
        return await end_process(self._process)

    def kill(self) -> None:
        kill_process(self._process)


def create_channel(receive: Callable[[FromFrontEnd], None]) -> MessageChannel:
    return MessageChannel(lambda content: receive(decode_from_front_end(content)))


def start_process(listener: socket.socket, protocol: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process of a front end. Returns it and this end of its channel.

    listener: where it will accept connections. protocol: see `compute_protocol`; the server process's.
    """
    own_end, their_end = socket.socketpair()
    own_end.setblocking(False)
    command = [sys.executable, "-P", "-m", "serve_llm.server.front_ends", "--channel", str(their_end.fileno())]
    command += ["--listener", str(listener.fileno()), "--protocol", protocol]
    descriptors = [their_end.fileno(), listener.fileno()]
    # In a session of its own, which the terminal's Ctrl-C does not reach.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True)
    their_end.close()
    return process, own_end


async def end_process(process: subprocess.Popen[bytes]) -> str:
    """Wait for a process whose channel is closed to exit, or kill it. Returns how it ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs, or is stopped
        await asyncio.to_thread(process.wait, EXIT_SECONDS)
    kill_process(process)
    code = await asyncio.to_thread(process.wait)
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def kill_process(process: subprocess.Popen[bytes]) -> None:
    """Idempotent."""
    if process.poll() is None:
        process.kill()
