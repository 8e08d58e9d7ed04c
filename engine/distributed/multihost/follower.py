"""The program of a node other than 0; `serve-llm --node-rank K` runs it instead of a server.

It asks node 0 which data-parallel engines have ranks here and runs those ranks (`session`). It exits with node 0.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from types import FrameType

from serve_llm.common import hosts
from serve_llm.common.curve_zmq import BEAT_SECONDS, CurveClient, format_url
from serve_llm.common.errors import EngineError, OptionError, PeerLost, ServeError
from serve_llm.common.logs import configure, hold_records, write_final_error
from serve_llm.common.options import parsers
from serve_llm.common.options.peer_variables import log_unread
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import parse_args
from serve_llm.engine.distributed.multihost import messages
from serve_llm.engine.distributed.multihost.leader import OPEN
from serve_llm.engine.distributed.multihost.session import (
    MASTER_SECONDS,
    EngineSession,
    Stopped,
    describe_silence,
    receive,
)

logger = logging.getLogger("serve_llm.engine.distributed.multihost.follower")  # also when run by -m

NAME_SECONDS = 300.0  # time for node 0's name to resolve, for example while its pod starts
GRACE_SECONDS = 5.0  # in addition to node 0's drain timeout, because node 0 gets the signal at the same time
LAST_SECONDS = 10.0  # time for all engines to end after one has ended normally
POLL_SECONDS = 0.05


class Follower:
    """Runs this node's ranks of all engines."""

    def __init__(self, options: Options) -> None:
        assert options.master_addr is not None
        self._options = options
        self._master = options.master_addr
        self._sessions: list[EngineSession] = []
        self._leave_at: float | None = None  # monotonic

    def run(self) -> int:
        """Return the exit code. Raises ServeError."""
        name, port = parsers.parse_address(self._master)
        numeric = _resolve(name)
        address = hosts.find_own_address(name, self._options.host_ip)
        # ZeroMQ resolves a name again when it reconnects, which helps if node 0 gets another address before it starts.
        host = numeric if ":" in numeric else name
        ports = self._find_engines(format_url(host, port), address)
        self._sessions = [
            EngineSession(self._options, engine, format_url(host, engine_port), address)
            for engine, engine_port in ports.items()
        ]
        try:
            for session in self._sessions:
                session.start()
            self._wait()
            return 0
        finally:
            for session in self._sessions:
                session.end()

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. The first signal leaves node 0 time to drain, the second ends this node immediately."""
        if self._leave_at is not None or not any(session.has_ranks for session in self._sessions):
            raise Stopped
        seconds = self._options.drain_timeout + GRACE_SECONDS
        logger.info("Continuing until node 0 exits, at most %.0f s; a second signal ends this node now", seconds)
        self._leave_at = time.monotonic() + seconds

    def _find_engines(self, url: str, address: str) -> dict[int, int]:
        """Ask node 0 which engines have ranks here. Returns their ports on node 0."""
        options = self._options
        if options.cluster_secret is None:
            logger.warning(OPEN, self._master)
        logger.info("Waiting for node 0 of %d nodes at %s", options.nnodes, self._master)
        request = messages.FindEngines(options.node_rank, options.nnodes, socket.gethostname(), address)
        deadline = time.monotonic() + MASTER_SECONDS
        while True:
            line = CurveClient(url, options.cluster_secret or "")
            try:
                line.send(messages.encode(request))
                message = receive(line, max(0.0, deadline - time.monotonic()))
                if isinstance(message, messages.NodeEngines):
                    return message.ports
                if message is None:
                    raise EngineError(f"after {MASTER_SECONDS:.0f} s node 0 {describe_silence(line)}")
            except PeerLost as error:
                logger.debug("The engine that listens at %s is replaced: %s", self._master, error)
            finally:
                line.close()
            time.sleep(BEAT_SECONDS)

    def _wait(self) -> None:
        """Return when all engines have ended normally. Raises the first error of a session, Stopped after a signal."""
        while any(session.is_alive for session in self._sessions):
            for session in self._sessions:
                if session.error is not None:
                    raise session.error
            if self._leave_at is not None and time.monotonic() > self._leave_at:
                raise Stopped
            if self._leave_at is None and not all(session.is_alive for session in self._sessions):
                self._leave_at = time.monotonic() + LAST_SECONDS  # node 0 is exiting; a replaced engine gets no EndNode
            time.sleep(POLL_SECONDS)
        error = next((session.error for session in self._sessions if session.error is not None), None)
        if error is not None:
            raise error


def _resolve(name: str) -> str:
    """Resolve node 0's name, which may become known only when node 0 starts. Raises OptionError."""
    deadline = time.monotonic() + NAME_SECONDS
    logged = False
    while True:
        try:
            return str(socket.getaddrinfo(name, 1, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            if time.monotonic() > deadline:
                here = f"on {socket.gethostname()} for {NAME_SECONDS:.0f} s"
                raise OptionError(f"--master-addr {name}: {error.strerror} {here}; give an IP") from None
            if not logged:
                logger.info("Waiting until the name %s can be resolved: %s", name, error.strerror)
            logged = True
            time.sleep(1.0)


def main() -> int:
    try:
        with hold_records(sys.argv[1:], os.environ):
            options = parse_args(sys.argv[1:], os.environ)
            log_unread(os.environ)
        configure(options.log_level, f"node {options.node_rank}", options.log_format)
        follower = Follower(options)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, follower.stop)
        return follower.run()
    except Stopped:
        return 0
    except ServeError as error:
        write_final_error(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
