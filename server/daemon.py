"""The daemon: open the socket, start the engine, build the app, serve, and stop cleanly.

The socket opens first, so that /health answers at once and a taken port fails early. The engine process starts next,
because its imports take longest; the app and the tokenizer are built while the engine loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from serve_llm.common.errors import OptionError
from serve_llm.common.open_files import raise_limit
from serve_llm.common.options.schema import Options

if TYPE_CHECKING:
    from serve_llm.server.assemble import Assembly
    from serve_llm.server.front_ends.group import FrontEndGroup

logger = logging.getLogger(__name__)

QUICK_STOP_SECONDS = 0.5  # for ended requests to get their last event, and to stop the engine after a second signal


def run(options: Options) -> int:
    """Serve until a signal. Returns the exit code; raises the ServeError that ended the start or the engine."""
    from serve_llm.common.logs import configure
    from serve_llm.server.thread_pool import run_main

    configure(options.log_level, format=options.log_format)
    raise_limit()
    code = run_main(serve(options))
    logger.info("Stopped")
    return code


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OptionError if the address is not available."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise OptionError(f"cannot listen on {host} port {port}: {error.strerror}; choose another {option}") from None
    return listener


def is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


async def serve(options: Options) -> int:
    """See `run`."""
    from serve_llm.server.engines.process import STOP_SECONDS
    from serve_llm.server.front_ends.gateway import FrontEndGateway
    from serve_llm.server.front_ends.group import FrontEndGroup
    from serve_llm.server.garbage import limit_collections
    from serve_llm.server.http.connection import HttpServer
    from serve_llm.server.http.startup_app import StartupApp

    began = time.perf_counter()
    signals = StopSignals()
    listener = listen(options.host, options.port)
    url = format_listening_url(listener, "https" if options.ssl_certfile else "http")
    front_ends = FrontEndGroup(options, listener) if options.has_front_ends else None
    if front_ends is not None:  # from the start to the end, because the default of SIGHUP is to end the process
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, front_ends.upgrade)
    logger.info("Listening on %s; loading %s", url, options.model)
    if not options.api_key and not is_loopback(listener):
        logger.warning("Anyone who can reach %s can use the server: set --api-key, or --host 127.0.0.1", url)
    startup_app = StartupApp(options.page)
    http_server = HttpServer(startup_app, options.limits, options.ssl_keyfile, options.ssl_certfile)
    serving = asyncio.ensure_future(http_server.serve(sockets=[listener if front_ends is None else listener.dup()]))
    gateway: FrontEndGateway | None = None
    try:
        if options.front_end_addr is not None:
            assert front_ends is not None
            gateway = FrontEndGateway(options, front_ends)
        assembly = await _assemble_until(signals.first, options, front_ends)
        if assembly is None:
            return 0
        startup_app.app = assembly.app
        try:
            async with contextlib.AsyncExitStack() as stack:
                if front_ends is not None:
                    if options.front_ends > 1:
                        http_server.stop_accepting()
                    await stack.enter_async_context(_serve_front_ends(front_ends, assembly, options))
                limit_collections()
                logger.info("Serving %s on %s after %.1f s", options.model, url, time.perf_counter() - began)
                await _run_until_stopped(assembly, options.drain_timeout, signals)
                return 0
        finally:
            is_urgent = signals.second.done()
            http_server.should_exit = True
            http_server.force_exit = is_urgent
            await assembly.stop(QUICK_STOP_SECONDS if is_urgent else STOP_SECONDS)
    finally:
        if front_ends is not None:
            await front_ends.stop()
            listener.close()
        if gateway is not None:
            await gateway.stop()
        http_server.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def _serve_front_ends(front_ends: FrontEndGroup, assembly: Assembly, options: Options) -> AsyncIterator[None]:
    """Let loaded front ends answer clients, and answer the requests that they forward."""
    from serve_llm.server.front_ends.background import keep_running
    from serve_llm.server.http.connection import HttpServer

    internal = socket.socket(socket.AF_UNIX)
    internal.bind(front_ends.server_socket)
    internal.listen(2048)
    server = HttpServer(assembly.app, options.limits, None, None)
    answering = asyncio.ensure_future(server.serve(sockets=[internal]))
    keeping = asyncio.ensure_future(keep_running(front_ends.serve, "watches the front ends"))
    try:
        yield
    finally:
        keeping.cancel()
        await front_ends.stop()
        server.should_exit = True
        await answering


def format_listening_url(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _assemble_until(
    stopped: asyncio.Future[None], options: Options, front_ends: FrontEndGroup | None
) -> Assembly | None:
    """Start the engine, build the app and load the front ends; None if `stopped` completes first."""
    assembling = asyncio.ensure_future(_assemble(options, front_ends))
    await _first_of(assembling, stopped)
    if assembling.done():
        return assembling.result()
    assembling.cancel()
    await asyncio.wait([assembling])
    return None


async def _assemble(options: Options, front_ends: FrontEndGroup | None) -> Assembly:
    from serve_llm.server.assemble import assemble

    assembly = await assemble(options, front_ends)
    if front_ends is not None:
        try:
            await front_ends.load()
        except BaseException:
            await assembly.stop()
            raise
    return assembly


async def _run_until_stopped(assembly: Assembly, drain_seconds: float, signals: StopSignals) -> None:
    """Serve until the first signal, then drain. Raises the error of the supervisor if it gives up before."""
    admission = assembly.admission
    watching = asyncio.ensure_future(assembly.supervisor.watch())
    await _first_of(watching, signals.first)
    if watching.done():
        raise watching.result()
    admission.draining = True
    await assembly.stop_batches()
    if admission.num_open:
        logger.info(
            "Stopping: open requests (%d) have %g s to finish; a second signal ends them",
            admission.num_open,
            drain_seconds,
        )
    else:
        logger.info("Stopping: no requests are open")
    draining = asyncio.ensure_future(admission.drained())
    await _first_of(draining, watching, signals.second, seconds=drain_seconds)
    watching.cancel()
    if not draining.done():
        logger.warning("Ending %d open requests", admission.num_open)
        admission.end_open()
        await _first_of(draining, seconds=QUICK_STOP_SECONDS)
        draining.cancel()


async def _first_of(*futures: asyncio.Future[Any], seconds: float | None = None) -> None:
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


class StopSignals:
    """SIGINT and SIGTERM as two futures: the first signal drains, the second one stops immediately."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(None)
                return
