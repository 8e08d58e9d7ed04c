"""Connections between two hosts: whether they can be opened, whether large packets pass, and how fast they are.

Each host runs a `ProbeServer` on a port that the system chooses, as the serving processes do; the other hosts call
`reach_all` and `measure_speed`. An exchange starts with 16 bytes: how many bytes follow, and how many to send back.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import statistics
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from serve_llm.cli.check.host import HostReport

CONNECT_SECONDS = 2.0  # two lost handshakes
ANSWER_SECONDS = 5.0  # on an open connection, for a process that gets no processor time
EXCHANGE_SECONDS = 1.5
LARGE_BYTES = 1 << 18  # more than any packet, so that full packets are sent
_HEADER = struct.Struct("!QQ")
_HELLO = struct.Struct("!I")
_CHUNK = bytes(1 << 18)
# Usual MTUs: jumbo frames, Ethernet, Ethernet minus tunnel headers, and the minimum of IPv6 and IPv4.
_MTUS = (9000, 8900, 4000, 1500, 1480, 1450, 1400, 1280, 1000, 576)


class Reachability(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one host can connect to another."""

    source: int
    target: int
    failure: str = ""  # empty if connected and answered; else timeout, refused, or the system's message
    large_lost: str = ""  # direction in which large packets are lost: "there", "back", or empty
    path_mtu: int = 0  # with large_lost: the largest usual packet size that passes; 0 if none does


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What one host measured to another."""

    source: int
    target: int
    latency_us: float = 0.0  # median round trip of a few bytes
    bandwidth: float = 0.0  # bytes per second, of the fastest exchange
    failure: str = ""


class ProbeServer:
    """Answers exchanges on a TCP port and records which ranks are heard over UDP on the same port. Its threads end with
    the process."""

    def __init__(self, address: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        while True:
            self._listener = socket.create_server((address, 0), family=family, backlog=128)
            self.port = int(self._listener.getsockname()[1])
            self._datagrams = socket.socket(family, socket.SOCK_DGRAM)
            try:
                self._datagrams.bind((address, self.port))
                break
            except OSError:  # another program uses the UDP port
                self._listener.close()
                self._datagrams.close()
        self.heard: set[int] = set()
        for loop in (self._accept, self._receive_hellos):
            threading.Thread(target=loop, daemon=True).start()

    def send_hello(self, rank: int, targets: Sequence[HostReport]) -> None:
        """Send UDP datagrams to the other hosts' servers; several, because some may be lost."""
        for _ in range(3):
            for target in targets:
                with contextlib.suppress(OSError):  # no route: `reach_all` reports it
                    self._datagrams.sendto(_HELLO.pack(rank), (target.address, target.probe_port))
            time.sleep(0.02)

    def _receive_hellos(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # an ICMP answer to a datagram that was sent
                data = self._datagrams.recv(64)
                if len(data) == _HELLO.size:
                    self.heard.add(*_HELLO.unpack(data))

    def _accept(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    @staticmethod
    def _answer(peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while len(header := peer.recv(_HEADER.size, socket.MSG_WAITALL)) == _HEADER.size:
                incoming, outgoing = _HEADER.unpack(header)
                _receive(peer, incoming)
                _send(peer, outgoing)


def reach_all(source: HostReport, targets: Sequence[HostReport]) -> list[Reachability]:
    """Connect to all targets at the same time. Takes seconds only if something is wrong."""
    if not targets:
        return []
    with ThreadPoolExecutor(len(targets)) as pool:
        return list(pool.map(lambda target: _reach(source, target), targets))


def _reach(source: HostReport, target: HostReport) -> Reachability:
    try:
        with _connect(target) as peer:
            peer.settimeout(ANSWER_SECONDS)
            _exchange(peer, 1, 1)
    except OSError as error:
        return Reachability(source=source.rank, target=target.rank, failure=_describe(error))
    for direction, sent, wanted in (("there", LARGE_BYTES, 1), ("back", 1, LARGE_BYTES)):
        if _passes(target, None, sent, wanted) or _passes(target, None, sent, wanted):
            continue
        # All usual sizes are tried at the same time, each on a connection limited to that size in both directions.
        sizes = [size for size in _MTUS if size < source.mtu]
        with ThreadPoolExecutor(len(_MTUS)) as pool:
            passed = list(pool.map(lambda size: _passes(target, size, sent, wanted), sizes))  # noqa: B023
        path_mtu = max((size for size, passes in zip(sizes, passed, strict=True) if passes), default=0)
        return Reachability(source=source.rank, target=target.rank, large_lost=direction, path_mtu=path_mtu)
    return Reachability(source=source.rank, target=target.rank)


def _passes(target: HostReport, mtu: int | None, sent: int, wanted: int) -> bool:
    try:
        with _connect(target, mtu) as peer:
            _exchange(peer, sent, wanted)
    except OSError:
        return False
    return True


def measure_speed(source: HostReport, target: HostReport, seconds: float = 0.15) -> LinkSpeed:
    """Latency, and bandwidth from source to target, for about `seconds` each."""
    try:
        with _connect(target) as peer:
            _exchange(peer, 1, 1)
            latencies = _time_exchanges(peer, 1, seconds)
            durations = _time_exchanges(peer, LARGE_BYTES * 8, seconds)
    except OSError as error:
        return LinkSpeed(source=source.rank, target=target.rank, failure=_describe(error))
    return LinkSpeed(
        source=source.rank,
        target=target.rank,
        latency_us=statistics.median(latencies) * 1e6,
        bandwidth=LARGE_BYTES * 8 / min(durations),
    )


def _time_exchanges(peer: socket.socket, sent: int, seconds: float) -> list[float]:
    """The duration of each exchange, repeated until the time is over."""
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while not durations or time.perf_counter() < end:
        began = time.perf_counter()
        _exchange(peer, sent, 1)
        durations.append(time.perf_counter() - began)
    return durations


def _connect(target: HostReport, mtu: int | None = None) -> socket.socket:
    is_ipv6 = ":" in target.address
    peer = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
    try:
        peer.settimeout(CONNECT_SECONDS)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if mtu is not None:
            headers = 60 if is_ipv6 else 40  # IP and TCP
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, mtu - headers)
        peer.connect((target.address, target.probe_port))
        peer.settimeout(EXCHANGE_SECONDS)
    except OSError:
        peer.close()
        raise
    return peer


def _exchange(peer: socket.socket, sent: int, wanted: int) -> None:
    peer.sendall(_HEADER.pack(sent, wanted))
    _send(peer, sent)
    _receive(peer, wanted)


def _send(peer: socket.socket, count: int) -> None:
    while count:
        count -= peer.send(memoryview(_CHUNK)[: min(count, len(_CHUNK))])


def _receive(peer: socket.socket, count: int) -> None:
    while count:
        received = len(peer.recv(min(count, len(_CHUNK))))
        if not received:
            raise ConnectionResetError(errno.ECONNRESET, "connection closed")
        count -= received


def _describe(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    return error.strerror or str(error)
