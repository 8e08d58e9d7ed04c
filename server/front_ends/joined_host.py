"""The program of a host whose front ends answer clients for a server elsewhere; `serve-llm front-end` runs it.

It opens the port, asks the server which model it serves, finds the checkpoint, and then starts and ends front ends as
the server requests. It joins again when the server comes back; until then, clients' connections wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Coroutine
from itertools import count
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.asyncio

from serve_llm.common.curve_zmq import CurveClient, create_dealer, format_url
from serve_llm.common.errors import OptionError, PeerLost
from serve_llm.common.hub import resolve_model
from serve_llm.common.options import parsers
from serve_llm.common.options.schema import Options
from serve_llm.server.daemon import StopSignals, format_listening_url, is_loopback, listen
from serve_llm.server.front_ends import tunnel
from serve_llm.server.front_ends.process import end_process, kill_process, start_process

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0  # how long to wait for the server's answer before checking for a signal


class _HostedProcess(NamedTuple):
    """A front end process of this host, whose channel is a stream."""

    process: subprocess.Popen[bytes]
    channel: tunnel.LocalStream


class FrontEndHostProgram:
    """Create it in the event loop."""

    def __init__(self, options: Options) -> None:
        """options: front_end_addr and cluster_secret are given; an empty model means the server's. Raises OptionError
        if the port is taken."""
        assert options.front_end_addr is not None and options.cluster_secret is not None
        self.options = options
        self.server = options.front_end_addr
        self.secret = options.cluster_secret
        self.listener = listen(options.host, options.port)
        self.url = format_listening_url(self.listener, "https" if options.ssl_certfile else "http")
        self.signals = StopSignals()
        name, port = parsers.parse_address(self.server)
        self.server_url = format_url(name, port)
        self.folder = tempfile.mkdtemp(prefix="serve-llm-")  # mode 700: only this user can connect

    async def run(self) -> int:
        """Returns the exit code. Raises OptionError if the server refuses this host."""
        logger.info("Listening on %s for the server at %s", self.url, self.server)
        if not is_loopback(self.listener):
            logger.info("Clients on other machines can connect; the server's --api-key decides who may use it")
        try:
            while not self.signals.first.done():
                welcome = await self._join()
                if welcome is None:
                    break
                directory = await asyncio.to_thread(self._find_checkpoint, welcome)
                await _Session(self, welcome.model).run(directory)
        finally:
            self.listener.close()
            shutil.rmtree(self.folder, ignore_errors=True)
        logger.info("Stopped")
        return 0

    async def _join(self) -> tunnel.Welcome | None:
        """Ask until the server answers; None if a signal comes first. Raises OptionError if it refuses this host."""
        client = self._ask()
        has_logged = False
        try:
            while not self.signals.first.done():
                try:
                    content = await asyncio.to_thread(client.receive, ANSWER_SECONDS)
                except PeerLost:
                    client.close()
                    client = self._ask()
                    continue
                answer = None if content is None else tunnel.decode_to_host(content)
                if isinstance(answer, tunnel.Welcome):
                    return answer
                if isinstance(answer, tunnel.Refused):
                    raise OptionError(f"the server at {self.server} refuses this host: {answer.message}")
                if not has_logged:
                    logger.info("Waiting for the server at %s", self.server)
                    has_logged = True
        finally:
            client.close()
        return None

    def _ask(self) -> CurveClient:
        """Return a connection with the server's answer, as soon as there is a server."""
        client = CurveClient(self.server_url, self.secret)
        client.send(tunnel.encode(tunnel.Join(tunnel.compute_join_protocol())))
        return client

    def _find_checkpoint(self, welcome: tunnel.Welcome) -> Path:
        model = self.options.model or welcome.model
        revision = None if self.options.model else welcome.revision
        return resolve_model(model, revision, self.options.download_dir, weights=False)


class _Session:
    """One connection to the server, until it ends."""

    def __init__(self, program: FrontEndHostProgram, model: str) -> None:
        """model: as the server names it."""
        self._options = program.options
        self._listener = program.listener
        self._signals = program.signals
        self._url = program.url
        self._model = model
        self._server_socket = f"{program.folder}/server"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = create_dealer(self._context, program.server_url, program.secret)
        dealer.connect(program.server_url)
        self._socket = zmq.asyncio.Socket.from_socket(dealer)
        self._numbers = count(1)
        self._front_ends: dict[int, _HostedProcess] = {}  # by stream
        self._requests: dict[int, tunnel.LocalStream] = {}  # by stream
        self._running: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, directory: Path) -> None:
        """directory: the checkpoint. Returns when the server is lost, or has let this host leave. Raises the exception
        of a background task, which ends the program: otherwise it would continue without the server's messages."""
        options = self._options
        loop = asyncio.get_running_loop()
        requests = await loop.create_unix_server(self._open_request, self._server_socket)
        self._send(
            tunnel.Ready(
                socket.gethostname(),
                options.front_ends,
                str(directory),
                self._server_socket,
                options.ssl_keyfile and os.path.abspath(options.ssl_keyfile),
                options.ssl_certfile and os.path.abspath(options.ssl_certfile),
            )
        )
        loops = [self._start(self._keep_alive()), self._start(self._leave())]
        receiving = self._start(self._receive_until_end())
        try:
            ends = [receiving, self._failure, self._signals.second]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
        finally:
            for task in [receiving, *loops]:
                task.cancel()
            requests.close()
            await self._end_all()
            self._socket.close(linger=0)
            self._context.destroy(linger=0)
            os.unlink(self._server_socket)

    async def _receive_until_end(self) -> None:
        while True:
            try:
                async with asyncio.timeout(tunnel.LOST_SECONDS):
                    content = await self._socket.recv()
            except TimeoutError:
                logger.error("The server is lost: no message for %.0f s", tunnel.LOST_SECONDS)
                return
            if content and not self._receive(tunnel.decode_to_host(content)):
                return

    def _receive(self, message: tunnel.ToHost) -> bool:
        """Return False if the session is over."""
        if isinstance(message, tunnel.StreamData):
            stream = self._find_stream(message.stream)
            if stream is not None:
                stream.write(message.content)
        elif isinstance(message, tunnel.StreamRead):
            stream = self._find_stream(message.stream)
            if stream is not None:
                stream.note_read(message.num_bytes)
        elif isinstance(message, tunnel.StreamEnd):
            stream = self._find_stream(message.stream)
            if stream is not None:
                stream.close()
        elif isinstance(message, tunnel.StartFrontEnd):
            self._launch(message)
        elif isinstance(message, tunnel.Kill):
            if message.stream in self._front_ends:
                kill_process(self._front_ends[message.stream].process)
        elif isinstance(message, tunnel.Serving):
            logger.info("Serving %s on %s", self._model, self._url)
        elif isinstance(message, tunnel.Refused):
            if not self._signals.first.done():
                logger.warning("The server ends the connection: %s; joining again", message.message)
            return False
        return True

    def _find_stream(self, number: int) -> tunnel.LocalStream | None:
        if number in self._front_ends:
            return self._front_ends[number].channel
        return self._requests.get(number)

    # Streams

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    def _launch(self, message: tunnel.StartFrontEnd) -> None:
        process, channel_socket = start_process(self._listener, message.protocol)
        channel = tunnel.LocalStream(message.stream, self._send)
        self._front_ends[message.stream] = _HostedProcess(process, channel)  # now: data may already be here
        self._send(tunnel.FrontEndStarted(message.stream, process.pid))
        self._start(self._keep(message.stream, channel_socket))

    async def _keep(self, number: int, channel_socket: socket.socket) -> None:
        """Serve one process until it has ended."""
        process, channel = self._front_ends[number]
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=channel_socket)
        await channel.closed.wait()
        how = await end_process(process)
        del self._front_ends[number]
        self._send(tunnel.StreamEnd(number, how))

    def _open_request(self) -> tunnel.LocalStream:
        """A front end has connected to forward a request."""
        stream = tunnel.LocalStream(-next(self._numbers), self._send)
        self._requests[stream.number] = stream
        self._start(self._end_request(stream))
        return stream

    async def _end_request(self, stream: tunnel.LocalStream) -> None:
        await stream.closed.wait()
        del self._requests[stream.number]
        self._send(tunnel.StreamEnd(stream.number))

    async def _end_all(self) -> None:
        for front_end in self._front_ends.values():
            front_end.channel.abort()
        for request in self._requests.values():
            request.abort()
        while self._running:
            await asyncio.wait(self._running)

    # Keepalive messages

    async def _keep_alive(self) -> None:
        while True:
            self._send(tunnel.Keepalive())
            await asyncio.sleep(tunnel.KEEPALIVE_SECONDS)

    async def _leave(self) -> None:
        await asyncio.wait([self._signals.first])  # unlike await, this leaves the future alone if it is cancelled
        logger.info("Stopping: open requests may finish; a second signal ends them")
        self._send(tunnel.Leave())

    def _send(self, message: tunnel.FromHost) -> None:
        if not self._socket.closed:
            self._socket.send(tunnel.encode(message))
