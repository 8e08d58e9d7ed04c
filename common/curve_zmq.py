"""Encrypted messages between hosts: ZeroMQ over TCP with CurveZMQ, and detection of lost peers.

All processes of a service derive the same key pair from one secret: only those that know it can connect and read.
libzmq sends heartbeats from its own thread, so a long computation or import does not look like a lost peer.
"""

from __future__ import annotations

import hashlib
import socket as tcp
import time
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from serve_llm.common.errors import EngineError, OptionError, PeerLost

BEAT_SECONDS = 1.0
LOST_SECONDS = 4.0  # libzmq drops a connection without heartbeats for this long
REFUSED_SECONDS = 30.0  # handshakes also fail if a proxy accepts connections before its peer is up
BACKLOG = 4096  # connections that may wait to be accepted; others would try again after 1, 3, 7, ... seconds
PING = b""  # checks that a peer exists; no other message is empty

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED


@dataclass(frozen=True)
class Key:
    """A Curve25519 key pair in Z85, the encoding that libzmq expects."""

    secret: bytes
    public: bytes


def derive_key(secret: str) -> Key:
    """The key pair of a secret, the same on every host. Raises EngineError if libzmq has no CURVE."""
    if not zmq.has("curve"):
        raise EngineError("this libzmq has no CURVE, which multi-host serving needs: install pyzmq from its wheel")
    private = z85.encode(hashlib.sha256(b"serve-llm " + secret.encode()).digest())
    return Key(private, zmq.curve_public(private))


def format_url(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


class Endpoint:
    """Creates listening sockets on one address of this host; `close` closes them all."""

    def __init__(self, address: str, secret: str) -> None:
        self.address = address
        self.secret = secret
        self._key = derive_key(secret)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by the authenticator: whether a client's public key (Z85) is accepted."""
        return key == self._key.public

    def listen(self, port: int = 0, max_segment: int | None = None) -> tuple[zmq.Socket[bytes], str]:
        """A ROUTER socket for one thread, and its URL for `CurveClient`. port 0: any. max_segment: limit on the
        bytes of a TCP segment in both directions. Raises OptionError."""
        socket = self._context.socket(zmq.ROUTER)
        self._sockets.append(socket)
        _prepare(socket, self._key, ipv6=":" in self.address)
        socket.curve_server = True
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # report a lost peer instead of dropping messages silently
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        try:
            if max_segment is not None:
                port = _prepare_listener(socket, self.address, port, max_segment)
            socket.bind(format_url(self.address, port))
        except (zmq.ZMQError, OSError) as error:
            socket.close()
            raise OptionError(
                f"cannot listen on {self.address} port {port} for the other hosts: {error.strerror}"
            ) from None
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Close all sockets, which no other thread may still use. Idempotent."""
        if not self._context.closed:
            for socket in self._sockets:
                socket.close(linger=1000)
            self._authenticator.stop()
            self._context.destroy(linger=1000)


def create_dealer(context: zmq.Context[zmq.Socket[bytes]], url: str, secret: str) -> zmq.Socket[bytes]:
    """A DEALER socket that may `connect` to the URL of an `Endpoint` or, without encryption, to an ipc:// URL."""
    socket = context.socket(zmq.DEALER)
    if url.startswith("tcp://"):
        key = derive_key(secret)
        _prepare(socket, key, ipv6="[" in url)
        socket.curve_serverkey = key.public
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)  # ms
    return socket


def _prepare(socket: zmq.Socket[bytes], key: Key, ipv6: bool) -> None:
    socket.curve_secretkey = key.secret
    socket.curve_publickey = key.public
    socket.set_hwm(0)  # never drop messages; a peer that does not read loses its connection
    socket.ipv6 = ipv6
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(BEAT_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(LOST_SECONDS * 1000))


def _prepare_listener(socket: zmq.Socket[bytes], address: str, port: int, max_segment: int) -> int:
    """Bind `socket` to a listening TCP socket whose connections limit their segment size. Returns the port."""
    family = tcp.AF_INET6 if ":" in address else tcp.AF_INET
    listener = tcp.create_server((address, port), family=family, backlog=BACKLOG)
    listener.setsockopt(tcp.IPPROTO_TCP, tcp.TCP_MAXSEG, max_segment)
    bound_port = int(listener.getsockname()[1])
    socket.setsockopt(zmq.USE_FD, listener.detach())
    return bound_port


def send(socket: zmq.Socket[bytes], peer: bytes, message: bytes) -> bool:
    """Send from a ROUTER socket to one peer. Returns False if the peer is gone."""
    try:
        socket.send_multipart([peer, message])
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


class CurveClient:
    """The connecting end, which detects that the listening end is gone. For one thread."""

    def __init__(self, url: str, secret: str) -> None:
        """Connect in the background; libzmq retries until it succeeds."""
        self.url = url
        self.connected = False
        self._refused_since: float | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = create_dealer(self._context, url, secret)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(url)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def send(self, message: bytes) -> None:
        """Queue a message; the connection may come later."""
        self._socket.send(message)

    def receive(self, seconds: float) -> bytes | None:
        """Return the next message, None if none arrives in time. Raises PeerLost when an established connection is
        lost, OptionError when the other side refuses the secret."""
        deadline = time.monotonic() + seconds
        while True:
            ready = dict(self._poller.poll(max(0, int((deadline - time.monotonic()) * 1000))))
            if self._socket in ready:  # before the monitor: a last message matters more than the disconnect
                if (message := self._socket.recv()) != PING:
                    return message
            elif self._monitor in ready:
                self._handle_event(recv_monitor_message(self._monitor)["event"])
            elif time.monotonic() >= deadline:
                return None

    def _handle_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = True
            self._refused_since = None
        elif event == zmq.EVENT_DISCONNECTED and self.connected:
            raise PeerLost(f"the connection to {self.url.removeprefix('tcp://')} is lost")
        elif event & _REFUSED:
            now = time.monotonic()
            self._refused_since = self._refused_since or now
            if now - self._refused_since > REFUSED_SECONDS or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise OptionError(
                    f"{self.url.removeprefix('tcp://')} refuses the connection: --cluster-secret "
                    "(SERVE_LLM_CLUSTER_SECRET) must be the same on all hosts, or nothing listens behind that address"
                )

    def close(self) -> None:
        """Send queued messages for at most a second, then close. Idempotent."""
        if not self._context.closed:
            self._socket.disable_monitor()
            self._context.destroy(linger=1000)
