"""The program of a node other than 0; `serve-llm --node-rank K` runs it instead of a server.

It asks node 0 which ranks of which model to run, finds the model on this host, runs the ranks as child processes, and
reports their state. It neither serves nor computes, and ends with node 0.
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
from serve_llm.common.errors import CapacityError, EngineError, OptionError, PeerLost, ServeError
from serve_llm.common.hub import resolve_model
from serve_llm.common.logs import configure, write_final_error
from serve_llm.common.messages import Failed
from serve_llm.common.options import parsers
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import parse_args
from serve_llm.engine.devices import VISIBLE_DEVICES, list_gpus
from serve_llm.engine.distributed.launcher import WorkerLauncher
from serve_llm.engine.distributed.multihost import messages
from serve_llm.engine.distributed.multihost.leader import OPEN

logger = logging.getLogger("serve_llm.engine.distributed.multihost.follower")  # also when run by -m

MASTER_SECONDS = 3600.0  # for node 0 to be started, and to download the model
REJOIN_SECONDS = 600.0  # for node 0 to come back, or to replace an engine that died
NAME_SECONDS = 300.0  # for node 0's name to resolve, for example while its pod starts
GRACE_SECONDS = 5.0  # beyond node 0's drain timeout: node 0 gets the signal at the same time
POLL_SECONDS = 0.05


class Stopped(BaseException):
    """A signal ended this node."""


class EngineGone(EngineError):
    """Node 0's engine, which this node's ranks belonged to, has ended."""


class Follower:
    """Runs this node's ranks from JoinRequest to EndNode, and again if node 0 replaces its engine."""

    def __init__(self, options: Options) -> None:
        assert options.master_addr is not None
        self._options = options
        self._master = options.master_addr
        self._secret = options.cluster_secret or ""
        self._ranks: WorkerLauncher | None = None
        self._rank_numbers: list[int] = []
        self._leave_at: float | None = None  # monotonic
        self._is_replaced = False  # node 0 replaces an engine that dies

    def run(self) -> int:
        """Returns the exit code. Raises ServeError."""
        name, port = parsers.parse_address(self._master)
        numeric = _resolve(name)
        self._address = hosts.find_own_address(name, self._options.host_ip)
        # ZeroMQ resolves a name again when it reconnects, which helps if node 0 gets another address before it starts.
        url = format_url(numeric if ":" in numeric else name, port)
        deadline: float | None = None  # monotonic, for joining again
        while True:
            try:
                self._take_part(url, MASTER_SECONDS if deadline is None else max(0.0, deadline - time.monotonic()))
                return 0
            except (EngineGone, OptionError, CapacityError) as error:
                if self._ranks is not None and isinstance(error, EngineGone):
                    deadline = time.monotonic() + REJOIN_SECONDS
                if deadline is None or time.monotonic() > deadline or not self._is_replaced:
                    raise
                logger.error("%s; waits for the next engine, at most %.0f s", error, REJOIN_SECONDS)
            self._ranks = None
            time.sleep(BEAT_SECONDS)  # an engine that is ending refuses a node that it still counts as connected

    def _take_part(self, url: str, patience: float) -> None:
        """Run ranks of one engine until it shuts down in order. Raises EngineGone if it ends in another way."""
        self._line = CurveClient(url, self._secret)
        try:
            self._start(self._join(patience))
            self._watch()
        except PeerLost as error:
            raise EngineGone(f"node 0 is lost: {error}") from None
        except EngineGone:
            raise
        except ServeError as error:
            self._line.send(messages.encode(Failed.from_exception(error)))
            raise
        finally:
            if self._ranks is not None:
                self._ranks.end()
            self._line.close()

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. The first signal leaves node 0 time to drain, the second ends this node immediately."""
        if self._ranks is None or self._leave_at is not None:
            raise Stopped
        seconds = self._options.drain_timeout + GRACE_SECONDS
        logger.info("Going on until node 0 ends, at most %.0f s; a second signal ends this node now", seconds)
        self._leave_at = time.monotonic() + seconds

    def _join(self, patience: float) -> messages.RunRanks:
        options = self._options
        if options.cluster_secret is None:
            logger.warning(OPEN, self._master)
        logger.info("Waiting for node 0 of %d nodes at %s", options.nnodes, self._master)
        join = messages.JoinRequest(options.node_rank, options.nnodes, socket.gethostname(), self._address)
        self._line.send(messages.encode(join))
        message = self._receive(patience)
        if message is None:
            what = "says nothing" if self._line.connected else "cannot be reached: is it running, and its port open?"
            raise EngineError(f"after {patience:.0f} s node 0 at {self._master} still {what}")
        if isinstance(message, messages.EndNode):
            raise PeerLost(message.cause or "it is ending")
        assert isinstance(message, messages.RunRanks)
        return message

    def _receive(self, seconds: float) -> messages.ToNode | None:
        """Raises OptionError if node 0 refuses this node."""
        frame = self._line.receive(seconds)
        message = messages.decode_to_node(frame) if frame is not None else None
        if isinstance(message, messages.JoinRefused):
            raise OptionError(f"node 0 refuses this node: {message.reason}")
        return message

    def _start(self, order: messages.RunRanks) -> None:
        options = order.options
        messages.check_options_match(self._options, options)
        num_gpus = len(list_gpus(os.environ.get(VISIBLE_DEVICES)))
        if order.on_gpus and num_gpus < len(order.ranks):
            raise CapacityError(f"{len(order.ranks)} ranks on this host need as many GPUs; it has {num_gpus}")
        where = self._options.download_dir or options.download_dir
        directory = resolve_model(options.model, options.revision, where, weights=options.load_format == "auto")
        hosts.fingerprint(directory)  # raises ModelError for a broken file before processes are started
        logger.info("Runs rank %s of %s", " and ".join(map(str, order.ranks)), options.model)
        self._rank_numbers = order.ranks
        self._ranks = WorkerLauncher(
            order.ranks, order.url, secret=self._secret, address=self._address, directory=str(directory)
        )

    def _watch(self) -> None:
        """Report the ranks' state until node 0 sends EndNode. Raises EngineGone if that names a cause."""
        reported: dict[int, str] | None = None
        next_beat = 0.0
        while True:
            message = self._receive(POLL_SECONDS)
            if isinstance(message, messages.EngineServing):
                self._is_replaced = True
            if isinstance(message, messages.EndNode):
                if message.cause:
                    raise EngineGone(f"Node 0 ends: {message.cause}")
                return
            report = self._report()
            ended = {rank: status.ended for rank, status in report.ranks.items()}
            if ended != reported or time.monotonic() >= next_beat:
                reported = ended
                next_beat = time.monotonic() + BEAT_SECONDS
                self._line.send(messages.encode(report))
            if self._leave_at is not None and time.monotonic() > self._leave_at:
                raise Stopped

    def _report(self) -> messages.NodeReport:
        assert self._ranks is not None
        ended = self._ranks.ended()
        statuses = {}
        for rank in self._rank_numbers:
            pid, state = self._ranks.pid(rank), self._ranks.state(rank)
            statuses[rank] = messages.RankStatus(pid, state, ended.get(rank, ""))
        return messages.NodeReport(statuses)


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
                logger.info("Waiting until the name %s is known here: %s", name, error.strerror)
            logged = True
            time.sleep(1.0)


def main() -> int:
    try:
        options = parse_args(sys.argv[1:], os.environ)
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
