"""A node other than 0: `python -P -m serve_llm.engine.execute.follower ...`, what `serve-llm --node-rank K` becomes.

Asks node 0 which ranks to run and of which model, finds the model on this host, runs the ranks as processes of its own,
and reports how they fare. Serves nothing itself, and computes nothing. Ends with node 0.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from types import FrameType

from serve_llm.engine import values
from serve_llm.engine.arguments import parse_args
from serve_llm.engine.devices import VISIBLE, gpu_names
from serve_llm.engine.errors import BY_NAME, CapacityError, EngineError, OptionError, PeerLost, ServeError
from serve_llm.engine.execute import membership
from serve_llm.engine.execute.launch import LocalRanks
from serve_llm.engine.execute.nodes import OPEN
from serve_llm.engine.hub import resolve_model
from serve_llm.engine.logs import configure
from serve_llm.engine.options import Options
from serve_llm.engine.parallel import hosts
from serve_llm.engine.parallel.encrypted import BEAT_SECONDS, Line, url_of

logger = logging.getLogger("serve_llm.engine.execute.follower")  # also when run by -m

MASTER_SECONDS = 3600.0  # for node 0 to be started, and to download the model
REJOIN_SECONDS = 600.0  # for node 0 to come back, or to start another engine in the place of one that died
NAME_SECONDS = 300.0  # for the name of its host to become known, as where it is a pod that starts
GRACE_SECONDS = 5.0  # more than node 0 takes to finish its requests after the first signal: it got one too
POLL_SECONDS = 0.05


class Stopped(BaseException):
    """By a signal, while nothing is lost by it."""


class EngineGone(EngineError):
    """Node 0's engine, of which this node's ranks were a part."""


class Follower:
    """This node, from Join to End; again if node 0 replaces its engine."""

    def __init__(self, options: Options) -> None:
        assert options.master_addr is not None
        self._options = options
        self._master = options.master_addr
        self._secret = options.cluster_secret or ""
        self._ranks: LocalRanks | None = None
        self._numbers: list[int] = []  # of the ranks
        self._leave_at: float | None = None  # monotonic
        self._is_replaced = False  # node 0 starts another engine in the place of one that dies

    def run(self) -> int:
        """The exit code. Raises ServeError."""
        name, port = values.parse_address(self._master)
        numeric = _resolve(name)
        self._address = hosts.own_address(name, self._options.host_ip)
        # The name itself where that can be: it is looked up again if node 0 gets another address before it starts.
        url = url_of(numeric if ":" in numeric else name, port)
        deadline: float | None = None  # monotonic: to join again
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
            time.sleep(BEAT_SECONDS)  # an engine that ends refuses whom it has not missed yet

    def _take_part(self, url: str, patience: float) -> None:
        """With one engine of node 0, until that ends in order. Raises EngineGone when it ends in another way."""
        self._line = Line(url, self._secret)
        try:
            self._start(self._join(patience))
            self._watch()
        except PeerLost as error:
            raise EngineGone(f"node 0 is lost: {error}") from None
        except EngineGone:
            raise
        except ServeError as error:
            self._line.send(membership.encode(membership.Failed(_known(error), str(error))))
            raise
        finally:
            if self._ranks is not None:
                self._ranks.end()
            self._line.close()

    def stop(self, number: int, frame: FrameType | None) -> None:
        """The first signal leaves node 0 time to finish, if it serves; the second ends this node at once."""
        if self._ranks is None or self._leave_at is not None:
            raise Stopped
        seconds = self._options.drain_timeout + GRACE_SECONDS
        logger.info("Going on until node 0 ends, at most %.0f s; a second signal ends this node now", seconds)
        self._leave_at = time.monotonic() + seconds

    def _join(self, patience: float) -> membership.Run:
        options = self._options
        if options.cluster_secret is None:
            logger.warning(OPEN, self._master)
        logger.info("Waits for node 0 of %d nodes at %s", options.nnodes, self._master)
        join = membership.Join(options.node_rank, options.nnodes, socket.gethostname(), self._address)
        self._line.send(membership.encode(join))
        message = self._receive(patience)
        if message is None:
            what = "says nothing" if self._line.connected else "cannot be reached: is it running, and its port open?"
            raise EngineError(f"after {patience:.0f} s node 0 at {self._master} still {what}")
        if isinstance(message, membership.End):
            raise PeerLost(message.cause or "it is ending")
        assert isinstance(message, membership.Run)
        return message

    def _receive(self, seconds: float) -> membership.ToNode | None:
        frame = self._line.receive(seconds)
        message = membership.decode_to_node(frame) if frame is not None else None
        if isinstance(message, membership.Refused):
            raise OptionError(f"node 0 refuses this node: {message.reason}")
        return message

    def _start(self, order: membership.Run) -> None:
        options = order.options
        membership.check_same(self._options, options)
        num_gpus = len(gpu_names(os.environ.get(VISIBLE)))
        if order.on_gpus and num_gpus < len(order.ranks):
            raise CapacityError(f"{len(order.ranks)} ranks on this host need as many GPUs; it has {num_gpus}")
        where = self._options.download_dir or options.download_dir
        directory = resolve_model(options.model, options.revision, where, weights=options.load_format == "auto")
        hosts.fingerprint(directory)  # says which file is broken, before processes are started for it
        logger.info("Runs rank %s of %s", " and ".join(map(str, order.ranks)), options.model)
        self._numbers = order.ranks
        self._ranks = LocalRanks(
            order.ranks, order.url, secret=self._secret, address=self._address, directory=str(directory)
        )

    def _watch(self) -> None:
        """Until node 0 says End. Raises EngineGone if that is not in order."""
        told: dict[int, str] | None = None
        next_beat = 0.0
        while True:
            message = self._receive(POLL_SECONDS)
            if isinstance(message, membership.Serving):
                self._is_replaced = True
            if isinstance(message, membership.End):
                if message.cause:
                    raise EngineGone(f"Node 0 ends: {message.cause}")
                return
            report = self._report()
            ended = {rank: seen.ended for rank, seen in report.ranks.items()}
            if ended != told or time.monotonic() >= next_beat:
                told, next_beat = ended, time.monotonic() + BEAT_SECONDS
                self._line.send(membership.encode(report))
            if self._leave_at is not None and time.monotonic() > self._leave_at:
                raise Stopped

    def _report(self) -> membership.Report:
        assert self._ranks is not None
        ended = self._ranks.ended()
        ranks = {rank: (self._ranks.pid(rank), self._ranks.state(rank)) for rank in self._numbers}
        return membership.Report(
            {rank: membership.Seen(pid, state, ended.get(rank, "")) for rank, (pid, state) in ranks.items()}
        )


def _resolve(name: str) -> str:
    """An address of node 0, whose name may become known only when it starts. Raises OptionError."""
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
                logger.info("Waits until the name %s is known here: %s", name, error.strerror)
            logged = True
            time.sleep(1.0)


def _known(error: ServeError) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in BY_NAME)


def main() -> int:
    try:
        options = parse_args(sys.argv[1:], os.environ)
        configure(options.log_level, f"node {options.node_rank}")
        follower = Follower(options)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, follower.stop)
        return follower.run()
    except Stopped:
        return 0
    except ServeError as error:
        sys.stderr.write(f"serve-llm: {error}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
