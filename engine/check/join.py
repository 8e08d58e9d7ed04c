"""Who takes part: every node opens one connection to the master, node 0, in any order of starting.

A node that cannot connect says so over UDP, on the same port: whether that is heard, and whether the answer is, tells a
closed port from packets that are lost in one direction. The connection uses small packets only, so that it works where
large ones are lost. Messages are lines of JSON.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from typing import TypeVar

import msgspec

from serve_llm.engine.check.host import HostReport
from serve_llm.engine.errors import EngineError, OptionError

T = TypeVar("T")

_SMALL_SEGMENT = 500  # bytes; every network carries 576
_RETRY_SECONDS = 0.2


class Arrival(msgspec.Struct, frozen=True):
    """The first message of a node."""

    nnodes: int
    report: HostReport


class Answer(msgspec.Struct, frozen=True):
    """The master's answer to it."""

    refused: str = ""  # why the node may not take part
    seconds: float = 0.0  # for how long the master waits for others


class _Knock(msgspec.Struct, frozen=True):
    """Over UDP, while the connection does not come about. The master sends it back."""

    rank: int
    name: str
    answered: bool = False  # the master's answer to an earlier one has been heard


class Channel:
    """Messages over a connection. Every wait has a limit; raises EngineError when the other side is silent or gone."""

    def __init__(self, peer: socket.socket, name: str) -> None:
        self._peer, self._name, self._buffer = peer, name, b""

    def close(self) -> None:
        self._peer.close()

    def send(self, message: msgspec.Struct) -> None:
        try:
            self._peer.sendall(msgspec.json.encode(message) + b"\n")
        except OSError as error:
            raise EngineError(f"the connection to {self._name} is lost: {error}") from None

    def receive(self, kind: type[T], seconds: float) -> T:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            self._peer.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._peer.recv(1 << 16)
            except TimeoutError:
                raise EngineError(f"{self._name} is silent for {seconds:g} s") from None
            except OSError as error:
                raise EngineError(f"the connection to {self._name} is lost: {error}") from None
            if not data:
                raise EngineError(f"{self._name} has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise EngineError(f"{self._name} sends something else than this version of serve-llm: {error}") from None


class Gathering:
    """The master's side: listens from the start, so that nodes may come before this host has looked at itself. A
    context manager. Raises OptionError if it cannot listen there."""

    def __init__(self, address: str, port: int, nnodes: int, seconds: float) -> None:
        """seconds: for all nodes to arrive."""
        self.nodes: dict[int, tuple[HostReport, Channel]] = {}
        self._nnodes, self._port, self._seconds = nnodes, port, seconds
        self._knocks: dict[int, _Knock] = {}
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._datagrams = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._datagrams.bind((address, port))
            self._listener = socket.create_server((address, port), family=family, backlog=128)
        except OSError as error:
            self._datagrams.close()
            raise OptionError(
                f"cannot listen on {address} port {port}: {error.strerror}; is a service on it?"
            ) from None

    def __enter__(self) -> Gathering:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._datagrams.close()
        for report_and_channel in self.nodes.values():
            report_and_channel[1].close()

    def wait(self) -> dict[int, str]:
        """Until all nodes but this one are there. The ranks of those who are not in time, with cause and remedy."""
        deadline = time.monotonic() + self._seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, self._welcome)
            selector.register(self._datagrams, selectors.EVENT_READ, self._hear)
            while len(self.nodes) < self._nnodes - 1 and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    key.data()
        return {rank: self._why_not(rank) for rank in range(1, self._nnodes) if rank not in self.nodes}

    def _welcome(self) -> None:
        peer, source = self._listener.accept()
        channel = Channel(peer, f"a node at {source[0]}")
        try:
            arrival = channel.receive(Arrival, 2.0)
            report = arrival.report
            if arrival.nnodes != self._nnodes:
                refused = f"node 0 expects --nnodes {self._nnodes}, node {report.rank} has --nnodes {arrival.nnodes}"
            elif not 0 < report.rank < self._nnodes:
                refused = f"--node-rank {report.rank} is not one of 1 to {self._nnodes - 1}"
            elif report.rank in self.nodes:
                refused = f"--node-rank {report.rank} is taken by {self.nodes[report.rank][0].name}"
            else:
                refused = ""
            channel.send(Answer(refused, self._seconds))
        except EngineError:  # a port scanner, a browser: not one of ours
            peer.close()
            return
        if refused:
            peer.close()
        else:
            self.nodes[report.rank] = report, Channel(peer, f"node {report.rank} ({report.name})")

    def _hear(self) -> None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            data, source = self._datagrams.recvfrom(512)
            knock = msgspec.json.decode(data, type=_Knock)
            self._knocks[knock.rank] = knock
            self._datagrams.sendto(data, source)

    def _why_not(self, rank: int) -> str:
        knock = self._knocks.get(rank)
        if knock is None:
            return (
                f"node {rank} has not arrived within {self._seconds:g} s and nothing is heard from it: it is not "
                f"started, or its packets to this host are lost; with --node-rank {rank} it says what it meets"
            )
        if knock.answered:
            return (
                f"node {rank} ({knock.name}) cannot open connections to node 0, though packets pass both ways: "
                f"TCP port {self._port} of node 0 is closed; open it in node 0's firewall"
            )
        return (
            f"node {rank} ({knock.name}) cannot connect to node 0: its packets arrive, those from node 0 "
            f"to node {rank} are lost; look at the firewall of node {rank}, and at the routes from node 0 to it"
        )


def join(master: str, port: int, arrival: Arrival, seconds: float) -> tuple[Channel, float]:
    """Another node's side. Also for how many seconds node 0 may wait for others. Raises EngineError saying what was
    tried and what is known of the reason, OptionError when the master refuses this node."""
    deadline = time.monotonic() + seconds
    knock = _Knock(arrival.report.rank, arrival.report.name)
    family = socket.AF_INET6 if ":" in arrival.report.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect((master, port))
        datagrams.setblocking(False)
        while True:
            try:
                peer = _call(family, master, port, min(1.0, seconds))
                break
            except OSError as error:
                with contextlib.suppress(OSError):  # nobody there yet
                    datagrams.send(msgspec.json.encode(knock))
                    time.sleep(_RETRY_SECONDS)
                    knock = msgspec.structs.replace(knock, answered=bool(datagrams.recv(512)))
                    datagrams.send(msgspec.json.encode(knock))
                if time.monotonic() > deadline:
                    raise EngineError(_unreachable(master, port, error, knock.answered, seconds)) from None
                time.sleep(_RETRY_SECONDS / 4)
    channel = Channel(peer, "node 0")
    channel.send(arrival)
    answer = channel.receive(Answer, 10.0)
    if answer.refused:
        channel.close()
        raise OptionError(answer.refused)
    return channel, answer.seconds


def _call(family: int, master: str, port: int, seconds: float) -> socket.socket:
    peer = socket.socket(family)
    try:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_SEGMENT)
        peer.settimeout(seconds)
        peer.connect((master, port))
    except OSError:
        peer.close()
        raise
    return peer


def _unreachable(master: str, port: int, error: OSError, answered: bool, seconds: float) -> str:
    said = f"node 0 at {master} port {port} could not be reached within {seconds:g} s: "
    if isinstance(error, ConnectionRefusedError):
        return said + "the host is there, but nobody listens on the port; start node 0, or correct --master-addr"
    if answered:
        return said + f"its UDP port answers, TCP port {port} is closed; open it in node 0's firewall"
    if isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH:  # not even an answer to ARP
        return said + (
            "no answer at all: the host is off, or packets are lost on the way there or back; node 0 says whether it "
            "hears this node. Look at both firewalls and the routes"
        )
    return said + f"{error.strerror or error}; is --master-addr in a network that this host is connected to?"
