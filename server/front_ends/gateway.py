"""Admit hosts whose front ends answer clients for this server (`serve-llm front-end`), and carry their streams.

See `server.front_ends.tunnel` for the messages and `server.front_ends.joined_host` for the other side.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from serve_llm.common.curve_zmq import Endpoint
from serve_llm.common.errors import OptionError
from serve_llm.common.options import parsers
from serve_llm.common.options.schema import Options
from serve_llm.server.front_ends import tunnel
from serve_llm.server.front_ends.background import keep_running
from serve_llm.server.front_ends.group import FrontEndGroup
from serve_llm.server.front_ends.host import FrontEndHost
from serve_llm.server.front_ends.messages import FromFrontEnd, compute_protocol
from serve_llm.server.front_ends.process import FrontEndProcess, create_channel

logger = logging.getLogger(__name__)

OTHER_VERSION = tunnel.Refused("it runs another version of serve-llm: install the same one on both hosts")


class RemoteFrontEnd(FrontEndProcess):
    """A front end on a host that has joined."""

    def __init__(self, number: int, revision: int, send: Callable[[tunnel.ToHost], None]) -> None:
        super().__init__(number, revision)
        self.pid = 0
        self._send_to_host = send
        self._transport: tunnel.StreamTransport | None = None  # None until `connect`
        self._report = tunnel.ReadReport(number, send)
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        send(tunnel.StartFrontEnd(number, compute_protocol()))

    async def connect(self, receive: Callable[[FromFrontEnd], None]) -> None:
        self.channel = create_channel(receive)
        self._transport = tunnel.StreamTransport(self.number, self.channel, self._send_to_host)
        self.channel.connection_made(self._transport)

    async def wait(self) -> str:
        assert self.channel is not None, "connect() comes first"
        abandoned: asyncio.Future[Any] = asyncio.ensure_future(self.channel.closed.wait())
        await asyncio.wait([self._end, abandoned], return_when=asyncio.FIRST_COMPLETED)
        abandoned.cancel()
        return self._end.result() if self._end.done() else "a kill"

    def kill(self) -> None:
        self._send_to_host(tunnel.Kill(self.number))

    def receive(self, data: bytes) -> None:
        assert self.channel is not None, "a front end sends nothing before Setup"
        if self._is_abandoned:
            return
        try:
            self.channel.data_received(data)
        except Exception:
            logger.exception("A message of the front end process %d failed; the process is killed", self.pid)
            self.abandon()
        self._report.add(len(data))

    def note_read(self, num_bytes: int) -> None:
        """Record that the process has read this many bytes."""
        if self._transport is not None:
            self._transport.note_read(num_bytes)

    def end(self, reason: str) -> None:
        """Record that the process has ended, or that its host is lost. Idempotent."""
        if not self._end.done():
            self._end.set_result(reason)


class JoinedHost(FrontEndHost):
    """A joined host, which receives messages through the gateway."""

    has_own_clock = True

    def __init__(self, ready: tunnel.Ready, send: Callable[[tunnel.ToHost], None], server_socket: str) -> None:
        """server_socket: that of this host."""
        super().__init__(ready.num_front_ends, ready.server_socket)
        self.name = ready.hostname
        self.last_heard = time.monotonic()
        self._ready = ready
        self._send = send
        self._server_socket = server_socket
        self._has_served = False
        self._front_ends: dict[int, RemoteFrontEnd] = {}  # by stream
        self._requests: dict[int, tunnel.LocalStream] = {}  # forwarded requests, by stream
        self._newest_request = 0  # the newest stream of a request
        self._carrying: set[asyncio.Task[None]] = set()

    def advance(self, revision: int, drain_seconds: float) -> int:
        num_missing = super().advance(revision, drain_seconds)
        if self.num_serving and not self._has_served:
            self._has_served = True
            self._send(tunnel.Serving())
        return num_missing

    def launch(self, number: int, revision: int) -> FrontEndProcess:
        process = RemoteFrontEnd(number, revision, self._send)
        self._front_ends[number] = process
        return process

    def adapt(self, options: Options) -> Options:
        return replace(
            options,
            front_ends=self._ready.num_front_ends,
            ssl_keyfile=self._ready.ssl_keyfile,
            ssl_certfile=self._ready.ssl_certfile,
        )

    def find_directory(self, directory: str) -> str:
        return self._ready.directory

    def receive(self, message: tunnel.FromHost) -> None:
        self.last_heard = time.monotonic()
        if isinstance(message, tunnel.StreamData):
            process = self._front_ends.get(message.stream)
            request = self._find_request(message.stream)
            if process is not None:
                process.receive(message.content)
            elif request is not None:
                request.write(message.content)
        elif isinstance(message, tunnel.StreamRead):
            reader = self._front_ends.get(message.stream) or self._requests.get(message.stream)
            if reader is not None:
                reader.note_read(message.num_bytes)
        elif isinstance(message, tunnel.StreamEnd):
            if message.stream in self._front_ends:
                self._front_ends.pop(message.stream).end(message.reason)
            elif message.stream in self._requests:
                self._requests.pop(message.stream).close()
        elif isinstance(message, tunnel.FrontEndStarted) and message.stream in self._front_ends:
            self._front_ends[message.stream].pid = message.pid

    def close(self, reason: str) -> None:
        """Close all streams. reason: why the front ends have ended."""
        for process in self._front_ends.values():
            process.end(reason)
        for request in self._requests.values():
            request.close()
        self._front_ends = {}
        self._requests = {}

    def _find_request(self, number: int) -> tunnel.LocalStream | None:
        """Return the connection of a forwarded request, opened if it is new; None if it has ended."""
        if number < self._newest_request:
            self._newest_request = number
            stream = self._requests[number] = tunnel.LocalStream(number, self._send)
            task = asyncio.ensure_future(self._carry(stream))
            self._carrying.add(task)
            task.add_done_callback(self._carrying.discard)
        return self._requests.get(number)

    async def _carry(self, stream: tunnel.LocalStream) -> None:
        """Carry a forwarded request to the server until one side closes."""
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: stream, self._server_socket)
            await stream.closed.wait()
        except OSError:
            logger.debug("A forwarded request came while the server was shutting down")
        if self._requests.pop(stream.number, None) is not None:
            self._send(tunnel.StreamEnd(stream.number))


class FrontEndGateway:
    """Listens as soon as it is constructed. Create it in the event loop."""

    def __init__(self, options: Options, group: FrontEndGroup) -> None:
        """Raises OptionError if the address cannot be used."""
        assert options.front_end_addr is not None
        name, port = parsers.parse_address(options.front_end_addr)
        try:
            address = str(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            raise OptionError(f"--front-end-addr {name}: {error.strerror}") from None
        self._options = options
        self._group = group
        self._endpoint = Endpoint(address, options.cluster_secret or "")
        listening, _ = self._endpoint.listen(port)
        self._socket = zmq.asyncio.Socket.from_socket(listening)
        self._hosts: dict[bytes, JoinedHost] = {}  # by the identity of their connection
        self._tasks = [
            asyncio.ensure_future(keep_running(self._run, "receives from the hosts of front ends")),
            asyncio.ensure_future(keep_running(self._watch, "watches the hosts of front ends")),
        ]
        logger.info("Front ends on other hosts may join at %s", options.front_end_addr)

    async def stop(self) -> None:
        """Close the socket. The hosts notice and try to join again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._endpoint.close()

    async def _run(self) -> None:
        while True:
            peer, content = await self._socket.recv_multipart()
            if not content:  # see `curve_zmq.PING`
                continue
            try:
                message = tunnel.decode_from_host(content)
            except msgspec.MsgspecError:
                self._send(peer, OTHER_VERSION)
                continue
            try:
                self._receive(peer, message)
            except Exception:
                logger.exception("A message of a host of front ends failed: %s", type(message).__name__)
                if peer in self._hosts:
                    self._end(peer, "an error in the server")

    def _receive(self, peer: bytes, message: tunnel.FromHost) -> None:
        host = self._hosts.get(peer)
        if isinstance(message, tunnel.Join):
            self._send(peer, self._answer(message))
        elif isinstance(message, tunnel.Ready):
            host = JoinedHost(message, lambda answer: self._send(peer, answer), self._group.server_socket)
            self._hosts[peer] = host
            logger.info("%s joined with %d front ends", message.hostname, message.num_front_ends)
            self._group.add_host(host)
        elif host is None:
            # It was considered lost, or has restarted.
            self._send(peer, tunnel.Refused("the server does not know this host"))
        elif isinstance(message, tunnel.Leave):
            logger.info("%s leaves when its front ends have drained", host.name)
            host.num_wanted = 0
            self._group.advance()
        else:
            host.receive(message)

    def _answer(self, message: tunnel.Join) -> tunnel.Welcome | tunnel.Refused:
        if message.protocol != tunnel.compute_join_protocol():
            return OTHER_VERSION
        return tunnel.Welcome(self._options.model, self._options.revision)

    async def _watch(self) -> None:
        """Send Keepalive to the hosts, and detect those that send none."""
        while True:
            await asyncio.sleep(tunnel.KEEPALIVE_SECONDS)
            for peer, host in list(self._hosts.items()):
                self._send(peer, tunnel.Keepalive())
                if time.monotonic() - host.last_heard > tunnel.LOST_SECONDS:
                    self._end(peer, f"no message for {tunnel.LOST_SECONDS:.0f} s")
                elif not host.num_wanted and not host.processes:
                    logger.info("%s has left", host.name)
                    self._remove(peer)
                    self._send(peer, tunnel.Refused("it has left"))

    def _end(self, peer: bytes, cause: str) -> None:
        """Give up a host. If it is still there, it joins again."""
        logger.error("%s is lost, with its front ends' requests: %s", self._hosts[peer].name, cause)
        self._remove(peer)
        self._send(peer, tunnel.Refused(cause))

    def _remove(self, peer: bytes) -> None:
        host = self._hosts.pop(peer)
        self._group.remove_host(host)
        host.close("the loss of its host")

    def _send(self, peer: bytes, message: tunnel.ToHost) -> None:
        sending = asyncio.ensure_future(self._socket.send_multipart([peer, tunnel.encode(message)]))
        sending.add_done_callback(_ignore_lost_peer)


def _ignore_lost_peer(sending: asyncio.Future[Any]) -> None:
    """Ignore it: a lost peer is detected by its silence."""
    error = None if sending.cancelled() else sending.exception()
    if error is not None and not isinstance(error, zmq.ZMQError):
        logger.error("A message to a host of front ends was not sent", exc_info=error)
