"""Connections between two hosts: can they be opened, do large packets get through, how fast are they.

Each host runs a `Server` on a port that the system chooses, as the serving processes do; the others call `reach` and
`speed`. One exchange: 16 bytes say how many bytes follow and how many are wanted back.
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

from serve_llm.engine.check.host import HostReport

CONNECT_SECONDS = 2.0  # two lost handshakes
ANSWER_SECONDS = 5.0  # of a process that may be starved, on a connection that is there
EXCHANGE_SECONDS = 1.5
LARGE = 1 << 18  # bytes: more than any packet, so that full ones are sent
_HEADER = struct.Struct("!QQ")
_HELLO = struct.Struct("!I")
_CHUNK = bytes(1 << 18)
# What networks are usually set to: jumbo frames, Ethernet, and Ethernet less the headers of tunnels.
_MTUS = (9000, 8900, 4200, 4000, 1500, 1480, 1460, 1450, 1430, 1420, 1400, 1380, 1350, 1300, 1280, 1200, 1000, 800, 576)


class Reach(msgspec.Struct, frozen=True, kw_only=True):
    """What one host found when it called another."""

    source: int
    target: int
    failure: str = ""  # empty: connected and answered; else timeout, refused, or the system's words
    large_lost: str = ""  # "there", "back", or empty
    path_mtu: int = 0  # with large_lost: largest packet that gets through, of those tried; 0: none


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """What one host measured to another."""

    source: int
    target: int
    latency_us: float = 0.0  # a round trip of a few bytes, median
    there: float = 0.0  # bytes per second
    back: float = 0.0
    failure: str = ""


class Server:
    """Answers exchanges on a TCP port of the address, and notes who is heard over UDP on the same port. Threads end
    with the process."""

    def __init__(self, address: str) -> None:
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        while True:
            self._listener = socket.create_server((address, 0), family=self._family, backlog=128)
            self.port = int(self._listener.getsockname()[1])
            self._datagrams = socket.socket(self._family, socket.SOCK_DGRAM)
            try:
                self._datagrams.bind((address, self.port))
                break
            except OSError:  # another program's UDP port
                self._listener.close()
                self._datagrams.close()
        self.heard: set[int] = set()  # ranks
        for task in (self._accept, self._hear):
            threading.Thread(target=task, daemon=True).start()

    def hello(self, rank: int, targets: Sequence[HostReport]) -> None:
        """Tell the others' servers over UDP that this host's packets arrive; several times, as some may be lost."""
        for _ in range(3):
            for target in targets:
                with contextlib.suppress(OSError):  # no route: `reach` says so
                    self._datagrams.sendto(_HELLO.pack(rank), (target.address, target.probe_port))
            time.sleep(0.02)

    def _hear(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # an ICMP answer to something sent
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


def reach(source: HostReport, targets: Sequence[HostReport]) -> list[Reach]:
    """Call every target at once. Takes seconds only where something is wrong."""
    if not targets:
        return []
    with ThreadPoolExecutor(len(targets)) as pool:
        return list(pool.map(lambda target: _reach(source, target), targets))


def _reach(source: HostReport, target: HostReport) -> Reach:
    try:
        with _connect(target, None) as peer:
            peer.settimeout(ANSWER_SECONDS)
            _exchange(peer, 1, 1)
    except OSError as error:
        return Reach(source=source.rank, target=target.rank, failure=_words(error))
    lost = ""
    if not any(_passes(target, None, LARGE, 1) for _ in range(2)):
        lost = "there"
    elif not any(_passes(target, None, 1, LARGE) for _ in range(2)):
        lost = "back"
    if not lost:
        return Reach(source=source.rank, target=target.rank)
    return Reach(source=source.rank, target=target.rank, large_lost=lost, path_mtu=_path_mtu(target, source.mtu, lost))


def _path_mtu(target: HostReport, mtu: int, lost: str) -> int:
    """The largest of the usual sizes below mtu whose packets get through; each is tried on a connection of its own that
    keeps to it in both directions (TCP_MAXSEG), all at once."""
    sizes = [size for size in _MTUS if size < mtu]
    sent, wanted = (LARGE, 1) if lost == "there" else (1, LARGE)
    with ThreadPoolExecutor(len(sizes) or 1) as pool:
        passed = pool.map(lambda size: _passes(target, size, sent, wanted), sizes)
        return max((size for size, good in zip(sizes, passed, strict=True) if good), default=0)


def _passes(target: HostReport, mtu: int | None, sent: int, wanted: int) -> bool:
    try:
        with _connect(target, mtu) as peer:
            _exchange(peer, sent, wanted)
    except OSError:
        return False
    return True


def speed(source: HostReport, target: HostReport, seconds: float = 0.15) -> Speed:
    """Latency, and bandwidth in both directions, for about the seconds each."""
    try:
        with _connect(target, None) as peer:
            _exchange(peer, 1, 1)
            latencies = _timed(peer, 1, 1, seconds)
            there = LARGE * 8 / statistics.median(_timed(peer, LARGE * 8, 1, seconds))
            back = LARGE * 8 / statistics.median(_timed(peer, 1, LARGE * 8, seconds))
    except OSError as error:
        return Speed(source=source.rank, target=target.rank, failure=_words(error))
    return Speed(
        source=source.rank, target=target.rank, latency_us=statistics.median(latencies) * 1e6, there=there, back=back
    )


def _timed(peer: socket.socket, sent: int, wanted: int, seconds: float) -> list[float]:
    """Seconds of each exchange, repeated until the time is over."""
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        began = time.perf_counter()
        _exchange(peer, sent, wanted)
        found.append(time.perf_counter() - began)
    return found


def _connect(target: HostReport, mtu: int | None) -> socket.socket:
    peer = socket.socket(socket.AF_INET6 if ":" in target.address else socket.AF_INET)
    try:
        peer.settimeout(CONNECT_SECONDS)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if mtu is not None:  # less the headers of IP and TCP
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, mtu - (60 if ":" in target.address else 40))
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
        got = len(peer.recv(min(count, len(_CHUNK))))
        if not got:
            raise ConnectionResetError(errno.ECONNRESET, "connection closed")
        count -= got


def _words(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    return error.strerror or str(error)
