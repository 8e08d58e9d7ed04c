"""One front end process, as the server process sees it: start it, talk to it, notice its end, kill it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
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

EXIT_SECONDS = 1.0  # for a process to exit after it has closed its channel

Phase = Literal["loading", "spare", "serving", "draining"]


class FrontEndProcess:
    """Started by the constructor. It ends when its channel closes, so it never outlives this process."""

    def __init__(self, number: int, revision: int, listener: socket.socket) -> None:
        """number: counts the processes since the server started. revision: of the code that it was started with.
        listener: where it will accept connections."""
        self.number = number
        self.revision = revision
        self.phase: Phase = "loading"
        self.num_silent_polls = 0  # since its last message
        self.counted = 0  # number of the last CollectCounts that it answered
        self.adapters_version = 0  # version of the adapters that it knows
        self.relay: Relay | None = None  # None until Setup is sent
        self._own_end, their_end = socket.socketpair()
        self._own_end.setblocking(False)
        command = [sys.executable, "-P", "-m", "serve_llm.server.front_ends", "--channel", str(their_end.fileno())]
        command += ["--listener", str(listener.fileno()), "--protocol", compute_protocol()]
        descriptors = [their_end.fileno(), listener.fileno()]
        # In a session of its own, which the terminal's Ctrl-C does not reach.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=descriptors, start_new_session=True
        )
        their_end.close()
        self._channel: MessageChannel | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_open(self) -> int:
        """Generations that have not ended."""
        return 0 if self.relay is None else self.relay.num_open

    @property
    def is_connected(self) -> bool:
        return self._channel is not None

    async def connect(self, receive: Callable[[FromFrontEnd], None]) -> None:
        """receive: called in the event loop with each message."""
        channel = MessageChannel(lambda content: receive(decode_from_front_end(content)))
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=self._own_end)
        self._channel = channel

    async def wait(self) -> str:
        """Wait until the process has ended. Returns how it ended."""
        assert self._channel is not None, "connect() comes first"
        await self._channel.closed.wait()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs, or is stopped
            await asyncio.to_thread(self._process.wait, EXIT_SECONDS)
        self.kill()
        code = await asyncio.to_thread(self._process.wait)
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def send(self, message: ToFrontEnd) -> None:
        """Does nothing before `run` has connected, and after the process has ended."""
        if self._channel is not None:
            self._channel.send(encode(message))

    def kill(self) -> None:
        """Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
