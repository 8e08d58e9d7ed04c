"""An engine's part on node 0 of several hosts without Ray: admits the other nodes, assigns ranks to each, and watches
them."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from serve_llm.common import hosts
from serve_llm.common.curve_zmq import BEAT_SECONDS, PING, Endpoint, send
from serve_llm.common.engine_placement import EnginePlacement
from serve_llm.common.errors import CapacityError, EngineError, HostLost, OptionError, ServeError
from serve_llm.common.options import parsers
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.splits import name_numbers
from serve_llm.engine.distributed.choose import gather_facts
from serve_llm.engine.distributed.launcher import WorkerLauncher
from serve_llm.engine.distributed.multihost import messages
from serve_llm.engine.distributed.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

JOIN_SECONDS = 900.0  # time for all nodes to be started
DOWNLOAD_SECONDS = 3600.0  # time for a node to download the model
END_SECONDS = 3.0  # time for nodes to leave
POLL_SECONDS = 0.05

OPEN = "--cluster-secret is not set: anyone who reaches %s can take part; set it, or use a private network only"


@dataclass
class _FollowerNode:
    """One other node."""

    number: int
    ranks: range
    peer: bytes | None = None
    joined: messages.JoinRequest | None = None
    ranks_seen: dict[int, messages.RankStatus] = field(default_factory=dict)
    knows_serving: bool = False  # EngineServing was sent
    gone: ServeError | None = None  # HostLost, or an error with a complete message

    def __str__(self) -> str:
        if self.joined is None:
            return f"node {self.number}, which has not joined"
        return f"node {self.number}, host {self.joined.host} at {self.joined.address}"


def start_on_nodes(options: EngineOptions, engine: int = 0, *, replaces: bool = False) -> WorkerGroup:
    """Start an engine's ranks of this node now, and those of other nodes as they join. replaces: an engine has served
    before. Raises OptionError."""
    if options.node_rank:
        raise OptionError("--node-rank: nodes other than 0 are run by the command serve-llm only")
    assert options.master_addr is not None
    _, first_port = parsers.parse_address(options.master_addr)
    placement = EnginePlacement.from_options(options)
    endpoint = Endpoint(listening_address(options), options.cluster_secret or "")
    try:

        def launch(url: str) -> MultiHostLeader:
            return MultiHostLeader(options, endpoint, first_port, url, engine, replaces=replaces)

        return WorkerGroup(placement.num_ranks, launch, endpoint, JOIN_SECONDS + DOWNLOAD_SECONDS)
    except BaseException:
        endpoint.close()
        raise


def listening_address(options: EngineOptions) -> str:
    """Node 0's own address in the network of --master-addr. Raises OptionError if --master-addr is not this host."""
    assert options.master_addr is not None
    name, _ = parsers.parse_address(options.master_addr)
    address = hosts.find_own_address(name, options.host_ip)
    if options.host_ip is None and address not in (
        addresses := {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    ):
        raise OptionError(
            f"--master-addr {name} is {', '.join(map(str, addresses))}, which is not an address of this host, node 0; "
            f"its address there is {address}; if {name} is forwarded to it, set --host-ip {address}"
        )
    return address


class MultiHostLeader:
    """See `LaunchedWorkers`. A thread exchanges messages with the other nodes."""

    def __init__(
        self,
        options: EngineOptions,
        endpoint: Endpoint,
        first_port: int,
        url: str,
        engine: int = 0,
        *,
        replaces: bool = False,
    ) -> None:
        """first_port: that of --master-addr. url: where ranks send WorkerHello. engine: index of the data-parallel
        engine. replaces: an engine has served before."""
        self._options = options
        self._url = url
        self._engine = engine
        self._placement = EnginePlacement.from_options(options)
        self._ports = self._placement.ports(first_port)
        others = {node: ranks for node, ranks in self._placement.ranks(engine).items() if node}
        self._nodes = {number: _FollowerNode(number, ranks) for number, ranks in others.items()}
        self._node_of = {rank: node for node in self._nodes.values() for rank in node.ranks}
        listener, join_url = endpoint.listen(self._ports[engine])
        self._socket = listener
        self._where = join_url.removeprefix("tcp://")
        self._ending = threading.Event()
        self._cause = ""
        self._has_served = replaces
        self._deadline = time.monotonic() + JOIN_SECONDS
        self._next_beat = 0.0
        if options.cluster_secret is None and self._ports[engine] == first_port:  # one of the engines says so
            logger.warning(OPEN, self._where)
        logger.info("Waiting for %s at %s", name_numbers("node", self._nodes), self._where)
        local_ranks = self._placement.local_ranks(engine)
        self._local = WorkerLauncher(local_ranks, url, secret=endpoint.secret, address=endpoint.address)
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def find_ended(self) -> Mapping[int, str | ServeError]:
        ended: dict[int, str | ServeError] = dict(self._local.find_ended())
        for rank, node in self._node_of.items():
            if node.gone is not None:
                ended[rank] = node.gone
            elif rank in node.ranks_seen and node.ranks_seen[rank].ended:
                ended[rank] = node.ranks_seen[rank].ended
        return ended

    def describe_place(self, rank: int) -> str:
        node = self._node_of.get(rank)
        if node is None:
            return f"node 0, {self._local.describe_place(rank)}"
        return f"{node}, pid {node.ranks_seen[rank].pid}" if rank in node.ranks_seen else str(node)

    def state(self, rank: int) -> str:
        node = self._node_of.get(rank)
        if node is None:
            return self._local.state(rank)
        return node.ranks_seen[rank].state if rank in node.ranks_seen else ""

    def serve(self) -> None:
        self._has_served = True

    def end(self, cause: str = "") -> None:
        self._cause = self._cause or cause
        self._ending.set()
        self._local.end()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._listen(POLL_SECONDS)
                self._announce_serving()
                self._check_nodes()
        except Exception as error:
            logger.exception("the connection to other nodes failed")
            for node in self._nodes.values():
                node.gone = EngineError(f"the connection to other nodes failed: {error}")
        self._send_goodbyes()
        self._socket.close()

    def _listen(self, seconds: float) -> None:
        timeout = int(seconds * 1000)
        while self._socket.poll(timeout):
            peer, frame = self._socket.recv_multipart()
            try:
                message = messages.decode_from_node(frame)
            except msgspec.DecodeError:
                self._send(peer, messages.JoinRefused("node 0 does not understand this node: is it the same version?"))
                continue
            self._receive(peer, message)
            timeout = 0

    def _receive(self, peer: bytes, message: messages.FromNode) -> None:
        if isinstance(message, messages.FindEngines):
            return self._direct(peer, message)
        if isinstance(message, messages.JoinRequest):
            return self._admit(peer, message)
        node = next((node for node in self._nodes.values() if node.peer == peer), None)
        if node is None:
            return
        if isinstance(message, messages.NodeReport):
            node.ranks_seen = message.ranks
        else:
            node.gone = node.gone or message.to_exception(prefix=f"{node}: ")

    def _direct(self, peer: bytes, request: messages.FindEngines) -> None:
        """Tell a node which engines to join."""
        nnodes = self._options.nnodes
        if request.nnodes != nnodes:
            reason = f"node 0 has --nnodes {nnodes}, node {request.node} has --nnodes {request.nnodes}"
        elif not 0 < request.node < nnodes:
            reason = f"--node-rank {request.node} is not from 1 to {nnodes - 1}"
        else:
            engines = self._placement.engines(request.node)
            self._send(peer, messages.NodeEngines({engine: self._ports[engine] for engine in engines}))
            return
        self._refuse(peer, request, reason)

    def _admit(self, peer: bytes, join: messages.JoinRequest) -> None:
        node = self._nodes.get(join.node)
        if node is None or join.engine != self._engine:
            reason = (
                f"node 0 was started again with other options, and node {join.node} no longer has ranks of this engine"
            )
        elif node.gone is not None or (node.peer is not None and not send(self._socket, node.peer, PING)):
            return self._reject(peer, f"{node} was lost")
        elif node.peer is not None:
            reason = f"--node-rank {join.node} is taken by {node}"
        else:
            node.peer = peer
            node.joined = join
            logger.info("Joined: %s, for %s", node, name_numbers("rank", node.ranks))
            on_gpus = gather_facts(self._options).num_gpus is not None
            options = messages.without_secrets(self._options)
            self._send(peer, messages.RunRanks(list(node.ranks), on_gpus, options, self._url))
            return
        self._refuse(peer, join, reason)

    def _reject(self, peer: bytes, cause: str) -> None:
        """Direct a node that is too late for this engine to its replacement, if there will be one."""
        if self._is_replaced:
            self._send(peer, messages.EngineServing())
        self._send(peer, messages.EndNode(cause))

    def _refuse(self, peer: bytes, request: messages.FindEngines | messages.JoinRequest, reason: str) -> None:
        logger.warning("Refused a node from %s at %s: %s", request.host, request.address, reason)
        self._send(peer, messages.JoinRefused(reason))

    def _send(self, peer: bytes, message: messages.ToNode) -> bool:
        return send(self._socket, peer, messages.encode(message))

    @property
    def _is_replaced(self) -> bool:
        """Whether the server replaces this engine if it ends."""
        return self._has_served and self._options.max_restarts > 0

    def _announce_serving(self) -> None:
        """Tell nodes that have not been told yet that an engine that dies will be replaced."""
        if not self._is_replaced:
            return
        for node in self._nodes.values():
            if node.peer is not None and not node.knows_serving:
                node.knows_serving = self._send(node.peer, messages.EngineServing())

    def _check_nodes(self) -> None:
        """Once a second, look for nodes that are lost or have not joined in time."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_SECONDS
        for node in self._nodes.values():
            if node.gone is not None:
                continue
            if node.peer is None and now > self._deadline:
                kind = CapacityError if self._has_served else EngineError  # a lost host may come back
                node.gone = kind(
                    f"node {node.number} has not joined at {self._where} within {JOIN_SECONDS:.0f} s: start serve-llm "
                    f"--nnodes {self._options.nnodes} --node-rank {node.number} --master-addr "
                    f"{self._options.master_addr} there, and check whether a firewall blocks the port"
                )
            elif node.peer is not None and not send(self._socket, node.peer, PING):
                node.gone = HostLost("loss of its node: host off, network cut, or its serve-llm killed")

    def _send_goodbyes(self) -> None:
        """Send EndNode to all connected nodes and wait until they have left."""
        self._announce_serving()
        peers = [node.peer for node in self._nodes.values() if node.peer is not None and node.gone is None]
        left = [peer for peer in peers if self._send(peer, messages.EndNode(self._cause))]
        deadline = time.monotonic() + END_SECONDS
        while left and time.monotonic() < deadline:
            if self._socket.poll(int(POLL_SECONDS * 1000)):
                peer, frame = self._socket.recv_multipart()
                if peer not in left and frame != PING:
                    self._reject(peer, self._cause or "it is ending")
            left = [peer for peer in left if send(self._socket, peer, PING)]
