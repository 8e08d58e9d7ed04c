"""A node's part in one engine of node 0: joins it, runs its ranks on this host as child processes, reports their state.

It neither serves nor computes, and does not need torch.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time

from serve_llm.common import hosts
from serve_llm.common.curve_zmq import BEAT_SECONDS, CurveClient
from serve_llm.common.engine_placement import EnginePlacement
from serve_llm.common.errors import CapacityError, EngineError, OptionError, PeerLost, ServeError
from serve_llm.common.hub import resolve_model
from serve_llm.common.messages import Failed
from serve_llm.common.options.schema import Options
from serve_llm.common.splits import name_numbers
from serve_llm.engine.devices import VISIBLE_DEVICES, claim_gpus, list_gpus
from serve_llm.engine.distributed.launcher import WorkerLauncher
from serve_llm.engine.distributed.multihost import messages

logger = logging.getLogger(__name__)

MASTER_SECONDS = 3600.0  # time for node 0 to be started and to download the model
REJOIN_SECONDS = 600.0  # time for node 0 to come back, or to replace an engine that died
POLL_SECONDS = 0.05


class Stopped(BaseException):
    """This node has been told to end."""


class EngineGone(EngineError):
    """The engine to which this node's ranks belonged has ended."""


class EngineSession:
    """Runs this node's ranks of one engine from JoinRequest to EndNode, and again after node 0 replaces the engine.

    Runs in its own thread, from `start` to `end`.
    """

    def __init__(self, options: Options, engine: int, url: str, address: str) -> None:
        """options: of this node. url: where the engine waits for this node. address: of this host."""
        self.engine = engine
        self.error: ServeError | None = None  # why the session has ended; None while it runs and after an orderly end
        self._options = options
        self._url = url
        self._address = address
        self._secret = options.cluster_secret or ""
        self._ranks: WorkerLauncher | None = None
        self._rank_numbers: list[int] = []
        self._name = "Node 0"  # name of the engine in messages
        self._is_replaced = False  # node 0 replaces the engine if it dies
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine {engine}", daemon=True)

    @property
    def has_ranks(self) -> bool:
        return self._ranks is not None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """End the ranks and the session."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._run_engines()
        except Stopped:
            logger.debug("Engine %d: this node's part has ended", self.engine)
        except ServeError as error:
            self.error = error
        except Exception as error:
            logger.exception("the part of this node in engine %d failed", self.engine)
            self.error = EngineError(f"engine {self.engine} on this node: {type(error).__name__}: {error}")

    def _run_engines(self) -> None:
        """Take part in the engine and its replacements. Raises ServeError."""
        deadline: float | None = None  # monotonic, for joining again
        while True:
            try:
                self._take_part(MASTER_SECONDS if deadline is None else max(0.0, deadline - time.monotonic()))
                return
            except (EngineGone, OptionError, CapacityError) as error:
                if isinstance(error, EngineGone) and (self._ranks is not None or self._is_replaced):
                    deadline = time.monotonic() + REJOIN_SECONDS
                if deadline is None or time.monotonic() > deadline or not self._is_replaced:
                    raise
                logger.error("%s; waiting for the next engine, at most %.0f s", error, REJOIN_SECONDS)
            self._ranks = None
            # An engine that is ending refuses a node that it still counts as connected.
            if self._ending.wait(BEAT_SECONDS):
                raise Stopped

    def _take_part(self, patience: float) -> None:
        """Run ranks of one engine until its orderly shutdown. Raises EngineGone if it ends in another way."""
        self._line = CurveClient(self._url, self._secret)
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

    def _join(self, patience: float) -> messages.RunRanks:
        join = messages.JoinRequest(self.engine, self._options.node_rank, socket.gethostname(), self._address)
        self._line.send(messages.encode(join))
        deadline = time.monotonic() + patience
        while True:
            message = self._receive()
            if isinstance(message, messages.RunRanks):
                return message
            if isinstance(message, messages.EngineServing):
                self._is_replaced = True
            if isinstance(message, messages.EndNode):
                raise EngineGone(f"{self._name} ends: {message.cause or 'node 0 ended it'}")
            if time.monotonic() > deadline:
                raise EngineError(f"after {patience:.0f} s node 0 {describe_silence(self._line)}")

    def _receive(self) -> messages.ToNode | None:
        """Return the next message; None if none arrives soon. Raises OptionError if node 0 refuses this node."""
        if self._ending.is_set():
            raise Stopped
        return receive(self._line, POLL_SECONDS)

    def _start(self, order: messages.RunRanks) -> None:
        options = order.options
        messages.check_options_match(self._options, options)
        environ = dict(os.environ)
        if order.on_gpus:
            num_gpus = len(list_gpus(environ.get(VISIBLE_DEVICES)))
            if num_gpus < len(order.ranks):
                raise CapacityError(f"{len(order.ranks)} ranks on this host need as many GPUs; it has {num_gpus}")
            engines = EnginePlacement.from_options(options).engines(self._options.node_rank)
            claim_gpus(environ, engines.index(self.engine), len(engines), len(order.ranks))
        where = self._options.download_dir or options.download_dir
        directory = resolve_model(options.model, options.revision, where, weights=options.load_format == "auto")
        hosts.fingerprint(directory)  # raises ModelError for a broken file before processes are started
        of_engine = ""
        if options.data_parallel_size > 1:
            self._name = f"engine {self.engine}"
            of_engine = f" of {self._name}"
        logger.info("Runs %s%s of %s", name_numbers("rank", order.ranks), of_engine, options.model)
        self._rank_numbers = order.ranks
        self._ranks = WorkerLauncher(
            order.ranks,
            order.url,
            secret=self._secret,
            address=self._address,
            directory=str(directory),
            environ=environ,
        )

    def _watch(self) -> None:
        """Report the ranks' state until node 0 sends EndNode. Raises EngineGone if EndNode names a cause."""
        reported: dict[int, str] | None = None
        next_beat = 0.0
        while True:
            message = self._receive()
            if isinstance(message, messages.EngineServing):
                self._is_replaced = True
            if isinstance(message, messages.EndNode):
                if message.cause:
                    raise EngineGone(f"{self._name} ends: {message.cause}")
                return
            report = self._report()
            ended = {rank: status.ended for rank, status in report.ranks.items()}
            if ended != reported or time.monotonic() >= next_beat:
                reported = ended
                next_beat = time.monotonic() + BEAT_SECONDS
                self._line.send(messages.encode(report))

    def _report(self) -> messages.NodeReport:
        assert self._ranks is not None
        ended = self._ranks.find_ended()
        statuses = {}
        for rank in self._rank_numbers:
            pid = self._ranks.pid(rank)
            state = self._ranks.state(rank)
            statuses[rank] = messages.RankStatus(pid, state, ended.get(rank, ""))
        return messages.NodeReport(statuses)


def receive(line: CurveClient, seconds: float) -> messages.ToNode | None:
    """Return node 0's next message; None if none arrives in time. Raises OptionError if node 0 refuses this node,
    PeerLost if the connection is lost."""
    frame = line.receive(seconds)
    message = messages.decode_to_node(frame) if frame is not None else None
    if isinstance(message, messages.JoinRefused):
        raise OptionError(f"node 0 refuses this node: {message.reason}")
    return message


def describe_silence(line: CurveClient) -> str:
    """Explain why node 0 has not answered."""
    what = "says nothing" if line.connected else "cannot be reached; is it running, and is its port open?"
    return f"at {line.url.removeprefix('tcp://')} still {what}"
