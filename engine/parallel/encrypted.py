"""Messages between processes of several hosts: ZeroMQ over TCP with CurveZMQ, and the news that the other end is gone.

One secret makes one key pair, which all processes of a service use: whoever knows it may connect, nobody else can read.
libzmq's own thread keeps up the heartbeats, so no long computation and no import looks like a death.
Knows nothing of ranks and of what the messages mean. No torch.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from serve_llm.engine.errors import EngineError, OptionError, PeerLost

BEAT_SECONDS = 1.0
LOST_SECONDS = 4.0  # without a sign of life; libzmq then drops the connection
REFUSED_SECONDS = 30.0  # handshakes fail as well where a proxy accepts for one that is not there yet
PING = b""  # what only asks whether a peer is there; no message of ours is empty

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED


@dataclass(frozen=True)
class Key:
    """A Curve25519 key pair in Z85, as libzmq takes it."""

    secret: bytes
    public: bytes


def key_of(secret: str) -> Key:
    """The same for the same secret, on every host."""
    if not zmq.has("curve"):
        raise EngineError("this libzmq has no CURVE, which several hosts need: install pyzmq from its wheel")
    private = z85.encode(hashlib.sha256(b"serve-llm " + secret.encode()).digest())
    return Key(private, zmq.curve_public(private))


def url_of(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


class Endpoint:
    """The address of this host on which its process listens; everything that it listens to ends with `close`."""

    def __init__(self, address: str, secret: str) -> None:
        self.address = address
        self.secret = secret
        self._key = key_of(secret)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", self)

    def callback(self, domain: str, key: bytes) -> bool:
        """What the authenticator asks about a client's public key (in Z85)."""
        return key == self._key.public

    def listen(self, port: int = 0) -> tuple[zmq.Socket[bytes], str]:
        """A ROUTER socket for one thread, and the URL for `Line`. port 0: any. Raises OptionError."""
        socket = self._context.socket(zmq.ROUTER)
        self._sockets.append(socket)
        _prepare(socket, self._key, ipv6=":" in self.address)
        socket.curve_server = True
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error for a peer that is gone, instead of silence
        try:
            socket.bind(url_of(self.address, port))
        except zmq.ZMQError as error:
            socket.close()
            raise OptionError(
                f"cannot listen on {self.address} port {port} for the other hosts: {error.strerror}"
            ) from None
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Close all sockets; no other thread may use one any more. Idempotent."""
        if not self._context.closed:
            for socket in self._sockets:
                socket.close(linger=1000)
            self._authenticator.stop()
            self._context.destroy(linger=1000)


def dealer(context: zmq.Context[zmq.Socket[bytes]], url: str, secret: str) -> zmq.Socket[bytes]:
    """A DEALER socket that may `connect` to the url of an `Endpoint`, or of this host (ipc://, without encryption)."""
    socket = context.socket(zmq.DEALER)
    if url.startswith("tcp://"):
        key = key_of(secret)
        _prepare(socket, key, ipv6="[" in url)
        socket.curve_serverkey = key.public
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)  # ms
    return socket


def _prepare(socket: zmq.Socket[bytes], key: Key, ipv6: bool) -> None:
    socket.curve_secretkey, socket.curve_publickey = key.secret, key.public
    socket.set_hwm(0)  # nothing is dropped; a peer that takes nothing loses its connection
    socket.ipv6 = ipv6
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(BEAT_SECONDS * 1000))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(LOST_SECONDS * 1000))


def send(socket: zmq.Socket[bytes], peer: bytes, message: bytes) -> bool:
    """From a ROUTER socket to one peer; False if that is gone."""
    try:
        socket.send_multipart([peer, message])
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return False
    return True


class Line:
    """The connecting end, which notices when the other one is gone. For one thread."""

    def __init__(self, url: str, secret: str) -> None:
        """Connects in the background, again and again until there is somebody."""
        self.url = url
        self.connected = False
        self._refused_since: float | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = dealer(self._context, url, secret)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(url)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def send(self, message: bytes) -> None:
        """Also before there is a connection."""
        self._socket.send(message)

    def receive(self, seconds: float) -> bytes | None:
        """The next message, None if none comes in time. Raises PeerLost when the connection was there and is gone,
        OptionError when the other side does not take the secret."""
        deadline = time.monotonic() + seconds
        while True:
            ready = dict(self._poller.poll(max(0, int((deadline - time.monotonic()) * 1000))))
            if self._socket in ready:  # first: last words count more than the end
                if (message := self._socket.recv()) != PING:
                    return message
            elif self._monitor in ready:
                self._note(recv_monitor_message(self._monitor)["event"])
            elif time.monotonic() >= deadline:
                return None

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected, self._refused_since = True, None
        elif event == zmq.EVENT_DISCONNECTED and self.connected:
            raise PeerLost(f"the connection to {self.url.removeprefix('tcp://')} is lost")
        elif event & _REFUSED:
            since = self._refused_since = self._refused_since or time.monotonic()
            if time.monotonic() - since > REFUSED_SECONDS or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise OptionError(
                    f"{self.url.removeprefix('tcp://')} refuses the connection: --cluster-secret "
                    "(SERVE_LLM_CLUSTER_SECRET) must be the same on all hosts, or nothing listens behind that address"
                )

    def close(self) -> None:
        """What was sent last still goes out, for a second. Idempotent."""
        if not self._context.closed:
            self._socket.disable_monitor()
            self._context.destroy(linger=1000)
