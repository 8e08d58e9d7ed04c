"""Node 0 of several hosts without Ray: takes in the other nodes, tells each what to run, and sees how they fare."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from serve_llm.engine import values
from serve_llm.engine.errors import BY_NAME, EngineError, OptionError, ServeError
from serve_llm.engine.execute import membership
from serve_llm.engine.execute.choose import look_around
from serve_llm.engine.execute.launch import LocalRanks
from serve_llm.engine.execute.roster import Roster
from serve_llm.engine.options import Options
from serve_llm.engine.parallel import hosts
from serve_llm.engine.parallel.encrypted import BEAT_SECONDS, PING, Endpoint, send
from serve_llm.engine.parallel.layout import shares

logger = logging.getLogger(__name__)

JOIN_SECONDS = 900.0  # for all nodes to be started
FETCH_SECONDS = 3600.0  # for a node to download the model
END_SECONDS = 3.0  # for nodes to leave
POLL_SECONDS = 0.05

OPEN = "--cluster-secret is not set: whoever reaches %s can take part; set it, or keep to a private network"


@dataclass
class _Node:
    """One other node."""

    number: int
    ranks: range
    peer: bytes | None = None
    joined: membership.Join | None = None
    seen: dict[int, membership.Seen] = field(default_factory=dict)
    knows: bool = False  # that an engine has served
    gone: str | ServeError | None = None  # how its ranks ended, or the error that says all

    def __str__(self) -> str:
        if self.joined is None:
            return f"node {self.number}, which has not joined"
        return f"node {self.number}, host {self.joined.host} at {self.joined.address}"


def start_on_nodes(options: Options, *, replaces: bool = False) -> Roster:
    """Start the ranks of this node, and those of the others as these join. replaces: an engine has served before.
    Raises OptionError."""
    if options.node_rank:
        raise OptionError("--node-rank: only the command serve-llm runs other nodes than 0")
    assert options.master_addr is not None
    _, port = values.parse_address(options.master_addr)
    endpoint = Endpoint(listening_address(options), options.cluster_secret or "")
    try:
        num_ranks = options.tensor_parallel_size * options.pipeline_parallel_size

        def launch(url: str) -> Nodes:
            return Nodes(options, endpoint, port, url, replaces=replaces)

        return Roster(num_ranks, launch, endpoint, JOIN_SECONDS + FETCH_SECONDS)
    except BaseException:
        endpoint.close()
        raise


def listening_address(options: Options) -> str:
    """Of node 0: what --master-addr names, if it is this host's. Raises OptionError."""
    assert options.master_addr is not None
    name, _ = values.parse_address(options.master_addr)
    own = hosts.own_address(name, options.host_ip)
    if options.host_ip is None and own not in (found := {entry[4][0] for entry in socket.getaddrinfo(name, None)}):
        raise OptionError(
            f"--master-addr {name} is {', '.join(map(str, found))}, which is no address of this host, node 0; its "
            f"address there is {own}; if {name} is forwarded to it, say --host-ip {own}"
        )
    return own


class Nodes:
    """See `roster.Launched`. A thread of its own talks to the other nodes."""

    def __init__(self, options: Options, endpoint: Endpoint, port: int, url: str, *, replaces: bool = False) -> None:
        """port: where other nodes join. url: where ranks say Hello. replaces: an engine has served before."""
        self._options, self._url = options, url
        self._port = port
        own, *others = shares(options.tensor_parallel_size * options.pipeline_parallel_size, options.nnodes)
        self._nodes = {number: _Node(number, ranks) for number, ranks in enumerate(others, start=1)}
        self._node_of = {rank: node for node in self._nodes.values() for rank in node.ranks}
        self._socket, joined_at = endpoint.listen(port)
        self._where = joined_at.removeprefix("tcp://")
        self._ending = threading.Event()
        self._cause = ""
        self._has_served = replaces
        self._deadline = time.monotonic() + JOIN_SECONDS
        self._next_beat = 0.0
        if options.cluster_secret is None:
            logger.warning(OPEN, self._where)
        logger.info("Waiting for node %s at %s", " and ".join(map(str, self._nodes)), self._where)
        self._local = LocalRanks(own, url, secret=endpoint.secret, address=endpoint.address)
        self._thread = threading.Thread(target=self._run, name="nodes", daemon=True)
        self._thread.start()

    def ended(self) -> Mapping[int, str | ServeError]:
        found: dict[int, str | ServeError] = dict(self._local.ended())
        for rank, node in self._node_of.items():
            if node.gone is not None:
                found[rank] = node.gone
            elif rank in node.seen and node.seen[rank].ended:
                found[rank] = node.seen[rank].ended
        return found

    def where(self, rank: int) -> str:
        node = self._node_of.get(rank)
        if node is None:
            return f"node 0, {self._local.where(rank)}"
        return f"{node}, pid {node.seen[rank].pid}" if rank in node.seen else str(node)

    def state(self, rank: int) -> str:
        node = self._node_of.get(rank)
        if node is None:
            return self._local.state(rank)
        return node.seen[rank].state if rank in node.seen else ""

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
                self._tell()
                self._look()
        except Exception as error:
            logger.exception("the connection to other nodes failed")
            for node in self._nodes.values():
                node.gone = EngineError(f"the connection to other nodes failed: {error}")
        self._say_goodbye()
        self._socket.close()

    def _listen(self, seconds: float) -> None:
        timeout = int(seconds * 1000)
        while self._socket.poll(timeout):
            peer, frame = self._socket.recv_multipart()
            try:
                message = membership.decode_from_node(frame)
            except msgspec.DecodeError:
                self._say(peer, membership.Refused("node 0 does not understand this node: is it the same version?"))
                continue
            self._take(peer, message)
            timeout = 0

    def _take(self, peer: bytes, message: membership.FromNode) -> None:
        if isinstance(message, membership.Join):
            return self._admit(peer, message)
        node = next((node for node in self._nodes.values() if node.peer == peer), None)
        if node is None:
            return
        if isinstance(message, membership.Report):
            node.seen = message.ranks
        else:
            node.gone = node.gone or BY_NAME.get(message.kind, EngineError)(f"{node}: {message.message}")

    def _admit(self, peer: bytes, join: membership.Join) -> None:
        node = self._nodes.get(join.node)
        if join.nnodes != self._options.nnodes:
            reason = f"node 0 has --nnodes {self._options.nnodes}, node {join.node} has --nnodes {join.nnodes}"
        elif node is None:
            reason = f"--node-rank {join.node} is none of 1 to {len(self._nodes)}"
        elif node.peer is not None:
            reason = f"--node-rank {join.node} is taken by {node}"
        else:
            node.peer, node.joined = peer, join
            logger.info("Joined: %s, for rank %s", node, " and ".join(map(str, node.ranks)))
            on_gpus = look_around(self._options).num_gpus is not None
            options = membership.without_secrets(self._options)
            self._say(peer, membership.Run(list(node.ranks), on_gpus, options, self._url))
            return
        logger.warning("Refused a node from %s at %s: %s", join.host, join.address, reason)
        self._say(peer, membership.Refused(reason))

    def _say(self, peer: bytes, message: membership.ToNode) -> bool:
        return send(self._socket, peer, membership.encode(message))

    def _tell(self) -> None:
        """Whoever does not know it yet that an engine which dies is replaced."""
        if not self._has_served or not self._options.max_restarts:
            return
        for node in self._nodes.values():
            if node.peer is not None and not node.knows:
                node.knows = self._say(node.peer, membership.Serving())

    def _look(self) -> None:
        """Once a second: who is lost, and who has not come in time."""
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_SECONDS
        for node in self._nodes.values():
            if node.gone is not None:
                continue
            if node.peer is None and now > self._deadline:
                node.gone = EngineError(
                    f"node {node.number} has not joined at {self._where} within {JOIN_SECONDS:.0f} s: start serve-llm "
                    f"--nnodes {self._options.nnodes} --node-rank {node.number} --master-addr "
                    f"{self._options.master_addr} there, and see whether a firewall closes the port"
                )
            elif node.peer is not None and not send(self._socket, node.peer, PING):
                node.gone = "loss of its node: host off, network cut, or its serve-llm killed"

    def _say_goodbye(self) -> None:
        """Tell all that are still there, and wait until they have gone."""
        self._tell()
        peers = [node.peer for node in self._nodes.values() if node.peer is not None and node.gone is None]
        left = [peer for peer in peers if self._say(peer, membership.End(self._cause))]
        deadline = time.monotonic() + END_SECONDS
        while left and time.monotonic() < deadline:
            if self._socket.poll(int(POLL_SECONDS * 1000)):
                self._socket.recv_multipart()
            left = [peer for peer in left if send(self._socket, peer, PING)]
