"""The executor's end of the control channel: one ROUTER socket for all ranks."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

import msgspec
import zmq

from serve_llm.common.curve_zmq import BACKLOG, PING, Endpoint, send
from serve_llm.engine.distributed import messages

logger = logging.getLogger(__name__)


class ControlSocket:
    """Exchanges messages with ranks over all connections. Not thread-safe.

    url: the address for ranks, a Unix socket unless ranks come from several hosts."""

    def __init__(self, size: int, endpoint: Endpoint | None, directory: Path | None = None) -> None:
        """size: number of ranks. endpoint: listens for ranks of several hosts; None if all are on this host. directory:
        for the Unix socket; no other user may reach it, and its owner removes it; None: create one."""
        self._size = size
        self._endpoint = endpoint
        self._own_directory: str | None = None
        self._path: Path | None = None  # where the Unix socket is
        self._identities: dict[int, bytes] = {}  # by rank
        self._ranks: dict[bytes, int] = {}  # by identity
        self._heartbeats: dict[int, bytes] = {}  # connections that stay open as long as their rank runs
        self._socket: zmq.Socket[bytes]
        if endpoint is None:
            if directory is None:
                self._own_directory = tempfile.mkdtemp(prefix="serve-llm-ranks-")  # mode 700
                directory = Path(self._own_directory)
            self._path = directory / "ranks"
            self._socket = zmq.Context.instance().socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
            self.url = f"ipc://{self._path}"
            self._socket.bind(self.url)
        else:
            listener, url = endpoint.listen()
            self._socket = listener
            self.url = url

    def send(self, rank: int, message: messages.ToRank) -> None:
        """Send to a rank that has sent WorkerHello. Drop the message if the rank is gone."""
        send(self._socket, self._identities[rank], messages.encode(message))

    def receive(self, seconds: float) -> list[tuple[int, messages.FromRank]]:
        """Return the messages that have arrived, with their ranks. If there are none, wait up to `seconds` for one."""
        received: list[tuple[int, messages.FromRank]] = []
        timeout = int(seconds * 1000)
        while self._socket.poll(timeout):
            timeout = 0
            identity, *frames = self._socket.recv_multipart()
            try:
                message = messages.decode_from_rank(b"".join(frames))
            except msgspec.DecodeError:
                logger.warning("ignored a message that no rank of this version sends")
                continue
            rank = self._identify(identity, message)
            if rank is not None:
                received.append((rank, message))
        return received

    def _identify(self, identity: bytes, message: messages.FromRank) -> int | None:
        """Find the rank that sent the message; None for heartbeat connections and for processes that are not ranks."""
        if isinstance(message, messages.WorkerAlive):
            if message.rank in range(self._size):
                self._heartbeats[message.rank] = identity
            return None
        if isinstance(message, messages.WorkerHello) and message.rank in range(self._size):
            self._identities[message.rank] = identity
            self._ranks[identity] = message.rank
        rank = self._ranks.get(identity)
        if rank is None or self._identities[rank] != identity:  # or from a process that another one has replaced
            logger.warning("ignored a message from a process that is not a rank")
            return None
        return rank

    def find_lost(self) -> list[int]:
        """Find the ranks whose heartbeat connection is gone."""
        return [rank for rank, peer in self._heartbeats.items() if not send(self._socket, peer, PING)]

    def remove_path(self) -> None:
        """Remove the socket's path. Call this once all ranks are connected and no longer need it, so that nothing is
        left behind however this process ends."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self._own_directory is not None:
            shutil.rmtree(self._own_directory, ignore_errors=True)

    def close(self) -> None:
        """Close the socket and remove its path. Idempotent."""
        self._socket.close()
        self.remove_path()

    def close_after_watching(self) -> None:
        """Close a socket of this host; an endpoint closes its own."""
        if self._endpoint is None:
            self._socket.close()
