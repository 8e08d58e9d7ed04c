"""How the hosts of a check meet: node 0 listens and the other nodes join; they may start in any order.

Messages use the encrypted channel that the server uses between hosts (`common.curve_zmq`), in TCP segments so small
that they pass where larger ones are lost. A node that cannot connect sends UDP datagrams to the same port: whether node
0 receives them and whether its answers return distinguishes a closed port from packets that are lost in one direction.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterable

import msgspec
import zmq

from serve_llm.cli.check.host import HostReport
from serve_llm.common.curve_zmq import PING, CurveClient, Endpoint, format_url, send
from serve_llm.common.errors import EngineError, OptionError, PeerLost

SEGMENT_BYTES = 500  # every network carries packets of 576 bytes
ANSWER_SECONDS = 400.0  # node 0 may still be checking its own host when a node joins
_RETRY_SECONDS = 0.2
_PING_SECONDS = 0.5


class CheckJoinRequest(msgspec.Struct, frozen=True):
    """The first message of a node."""

    nnodes: int
    report: HostReport


class JoinAnswer(msgspec.Struct, frozen=True):
    """Node 0's answer."""

    refusal: str = ""  # why the node may not take part
    seconds: float = 0.0  # how long node 0 waits for the other nodes


class _Knock(msgspec.Struct, frozen=True):
    """A datagram from a node that cannot connect yet. Node 0 sends it back."""

    rank: int
    name: str
    answered: bool = False  # whether an answer from node 0 has arrived


def cluster_secret() -> str:
    """The secret that the server would use; empty if there is none."""
    return os.environ.get("SERVE_LLM_CLUSTER_SECRET", "")


class CheckRendezvous:
    """Node 0's side. It listens from the start, so that nodes may join while node 0 checks its own host."""

    def __init__(self, address: str, port: int, nnodes: int, seconds: float, secret: str = "") -> None:
        """seconds: the limit for all nodes to join. port 0: any. Raises OptionError if the port is taken."""
        self.reports: dict[int, HostReport] = {}  # by rank, for nodes that have joined
        self.lost: dict[int, str] = {}  # why a node that had joined no longer answers, by rank
        self._peers: dict[int, bytes] = {}
        self._nnodes = nnodes
        self._seconds = seconds
        self._knocks: dict[int, _Knock] = {}
        self._endpoint = Endpoint(address, secret)
        self._datagrams = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            listener, url = self._endpoint.listen(port, max_segment=SEGMENT_BYTES)
            self._socket = listener
            self.port = int(url.rpartition(":")[2])
            self._datagrams.bind((address, self.port))
        except (OptionError, OSError) as error:
            self.close()
            raise OptionError(f"{error}; is another service using the port?") from None

    def __enter__(self) -> CheckRendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Deliver the last messages and close. Idempotent."""
        self._datagrams.close()
        self._endpoint.close()

    def wait(self) -> dict[int, str]:
        """Wait until all other nodes have joined. Returns why a node is absent, with the remedy, by rank."""
        deadline = time.monotonic() + self._seconds
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._datagrams, zmq.POLLIN)
        while len(self.reports) < self._nnodes - 1 and (left := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(int(left * 1000) + 1))
            if self._socket in ready:
                self._admit(*self._socket.recv_multipart())
            if self._datagrams.fileno() in ready:
                self._answer_knock()
        return {rank: self._explain_absence(rank) for rank in range(1, self._nnodes) if rank not in self.reports}

    def send(self, rank: int, message: bytes) -> None:
        """Send to a node; record it in `lost` if it is gone."""
        if rank not in self.lost and not send(self._socket, self._peers[rank], message):
            self.drop(rank, "has ended")

    def drop(self, rank: int, reason: str) -> None:
        """Record a node as lost, unless it is already. reason: what it did, as a verb phrase."""
        self.lost.setdefault(rank, f"node {rank} ({self.reports[rank].name}) {reason}")

    def collect(self, ranks: Iterable[int], seconds: float) -> dict[int, bytes]:
        """The next message of each of these nodes, by rank; nodes that do not answer in time are recorded in `lost`."""
        deadline = time.monotonic() + seconds
        ranks_of_peers = {peer: rank for rank, peer in self._peers.items()}
        messages: dict[int, bytes] = {}
        while missing := [rank for rank in ranks if rank not in messages and rank not in self.lost]:
            if self._socket.poll(int(_PING_SECONDS * 1000)):
                peer, message = self._socket.recv_multipart()
                if peer in ranks_of_peers:
                    messages[ranks_of_peers[peer]] = message
                continue
            for rank in missing:
                self.send(rank, PING)
                if time.monotonic() > deadline:
                    self.drop(rank, f"has been silent for {seconds:g} s")
        return messages

    def _admit(self, peer: bytes, message: bytes) -> None:
        try:
            request = msgspec.json.decode(message, type=CheckJoinRequest)
        except msgspec.DecodeError:
            answer = JoinAnswer(refusal="node 0 does not understand this node: is it the same version of serve-llm?")
            send(self._socket, peer, msgspec.json.encode(answer))
            return
        report = request.report
        refusal = ""
        if request.nnodes != self._nnodes:
            refusal = f"node 0 expects --nnodes {self._nnodes}, node {report.rank} has --nnodes {request.nnodes}"
        elif not 0 < report.rank < self._nnodes:
            refusal = f"--node-rank {report.rank} is not one of 1 to {self._nnodes - 1}"
        elif report.rank in self.reports:
            refusal = f"--node-rank {report.rank} is taken by {self.reports[report.rank].name}"
        is_there = send(self._socket, peer, msgspec.json.encode(JoinAnswer(refusal, self._seconds)))
        if is_there and not refusal:
            self.reports[report.rank] = report
            self._peers[report.rank] = peer

    def _answer_knock(self) -> None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            data, source = self._datagrams.recvfrom(512)
            knock = msgspec.json.decode(data, type=_Knock)
            self._knocks[knock.rank] = knock
            self._datagrams.sendto(data, source)

    def _explain_absence(self, rank: int) -> str:
        knock = self._knocks.get(rank)
        if knock is None:
            return (
                f"node {rank} has not arrived within {self._seconds:g} s and nothing is heard from it: it is not "
                f"started, or its packets to this host are lost; with --node-rank {rank} it says what it meets"
            )
        if knock.answered:
            return (
                f"node {rank} ({knock.name}) cannot open connections to node 0, though packets pass both ways: "
                f"TCP port {self.port} of node 0 is closed; open it in node 0's firewall"
            )
        return (
            f"node {rank} ({knock.name}) cannot connect to node 0: its packets arrive, those from node 0 "
            f"to node {rank} are lost; look at the firewall of node {rank}, and at the routes from node 0 to it"
        )


def join(
    master: str, port: int, request: CheckJoinRequest, seconds: float, secret: str = ""
) -> tuple[CurveClient, float]:
    """Join node 0 at that address. Returns the connection, and how long node 0 may wait for other nodes.

    Raises EngineError if node 0 cannot be reached, with what is known of the cause; OptionError if it refuses this
    node.
    """
    family = socket.AF_INET6 if ":" in request.report.address else socket.AF_INET
    address = str(socket.getaddrinfo(master, port, family, socket.SOCK_STREAM)[0][4][0])
    line = CurveClient(format_url(address, port), secret)
    try:
        line.send(msgspec.json.encode(request))
        frame = _wait_for_connection(line, (address, port), family, request.report, seconds)
        frame = frame or line.receive(ANSWER_SECONDS)
        if frame is None:
            raise EngineError(f"node 0 at {master} port {port} accepts connections, but does not answer")
        answer = msgspec.json.decode(frame, type=JoinAnswer)
        if answer.refusal:
            raise OptionError(answer.refusal)
    except PeerLost:
        line.close()
        raise EngineError(f"node 0 at {master} port {port} has ended") from None
    except msgspec.DecodeError:
        line.close()
        raise EngineError(
            f"what answers at {master} port {port} is not node 0 of a check, or another version of serve-llm"
        ) from None
    except BaseException:
        line.close()
        raise
    return line, answer.seconds


def _wait_for_connection(
    line: CurveClient, target: tuple[str, int], family: int, report: HostReport, seconds: float
) -> bytes | None:
    """Send knocks until there is a connection. Returns node 0's answer if it has arrived already."""
    deadline = time.monotonic() + seconds
    knock = _Knock(report.rank, report.name)
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect(target)
        datagrams.setblocking(False)
        while not line.connected:
            if frame := line.receive(_RETRY_SECONDS):
                return frame
            with contextlib.suppress(OSError):  # nothing has arrived, or nothing is listening there yet
                datagrams.send(msgspec.json.encode(knock))
                knock = msgspec.structs.replace(knock, answered=bool(datagrams.recv(512)))
            if time.monotonic() > deadline and not line.connected:
                raise EngineError(_explain_unreachable(target, family, knock.answered, seconds))
    return None


def _explain_unreachable(target: tuple[str, int], family: int, answered: bool, seconds: float) -> str:
    address, port = target
    summary = f"node 0 at {address} port {port} could not be reached within {seconds:g} s: "
    error: OSError = TimeoutError()
    try:
        with socket.socket(family) as probe:
            probe.settimeout(1.0)
            probe.connect(target)
    except OSError as failure:
        error = failure
    if isinstance(error, ConnectionRefusedError):
        return summary + "the host is there, but nothing listens on the port; start node 0, or correct --master-addr"
    if answered:
        return summary + f"its UDP port answers, TCP port {port} is closed; open it in node 0's firewall"
    if isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH:  # not even an answer to ARP
        return summary + (
            "no answer at all: the host is off, or packets are lost on the way there or back; node 0 says whether it "
            "hears this node. Look at both firewalls and the routes"
        )
    return summary + f"{error.strerror or error}; is --master-addr in a network that this host is connected to?"
