"""`serve-llm`: options, then the socket, the engine, the app, and a clean end. Everything else is a call.

The order makes the start short: the socket first, so that /health answers at once and a taken port fails early; the
engine process next, because its imports take longest; the app and the tokenizer are built while the engine loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from serve_llm.engine.arguments import parse_args
from serve_llm.engine.errors import OptionError, ServeError
from serve_llm.engine.limits import Limits
from serve_llm.engine.options import Options

if TYPE_CHECKING:
    from serve_llm.server.assemble import Assembly

logger = logging.getLogger("serve_llm.server.__main__")  # also when run by -m

QUICK_SECONDS = 0.5  # for open requests to hear their end, and for the engine's end after a second signal


def main() -> int:
    try:
        if sys.argv[1:2] and (command := COMMANDS.get(sys.argv[1])):
            return command(sys.argv[2:])
        options = parse_args(sys.argv[1:], os.environ)
        if options.node_rank:  # it serves no HTTP, and needs nothing of the server
            _become("serve_llm.engine.execute.follower", sys.argv[1:])
        return _run(options)
    except ServeError as error:
        with contextlib.suppress(OSError):  # the disk that keeps the log is full, or its reader gone
            sys.stderr.write(f"serve-llm: {error}\n")
        return error.exit_code


def _plan(argv: Sequence[str]) -> int:
    from serve_llm.server import plan

    return plan.main(argv, os.environ)


def _become(program: str, argv: Sequence[str]) -> NoReturn:
    """Another program, which may import what the server must not."""
    os.execv(sys.executable, [sys.executable, "-P", "-m", program, *argv])


def _check(argv: Sequence[str]) -> int:
    _become("serve_llm.engine.check", argv)


# First argument -> what takes the others.
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "check": _check,
    "plan": _plan,
}


def _run(options: Options) -> int:
    # Imported only now, so that --help and a mistyped option answer at once.
    import uvloop

    from serve_llm.engine.logs import configure

    configure(options.log_level)
    return uvloop.run(serve(options))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OptionError if the address cannot be had."""
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


async def serve(options: Options) -> int:
    """Serve until a signal or the engine's end. Returns the exit code; raises what the start failed with."""
    from serve_llm.server.daemon import Doorway, HttpServer
    from serve_llm.server.process import STOP_SECONDS

    began = time.perf_counter()
    listener = listen(options.host, options.port)
    stopping = Signals()
    door = Doorway()
    http = HttpServer(door, Limits.read(options.limit), options.ssl_keyfile, options.ssl_certfile)
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    try:
        opened = await _open(options, stopping)
        if opened is None:
            return 0
        door.app = opened.app
        try:
            host, port = listener.getsockname()[:2]
            seconds = time.perf_counter() - began
            shown = f"[{host}]" if ":" in host else host
            scheme = "https" if options.ssl_certfile else "http"
            logger.info("Serving %s on %s://%s:%d after %.1f s", options.model, scheme, shown, port, seconds)
            return await _until_stopped(opened, options.drain_timeout, stopping)
        finally:
            http.should_exit = True
            http.force_exit = stopping.second.done()
            await opened.stop(QUICK_SECONDS if stopping.second.done() else STOP_SECONDS)
    finally:
        http.should_exit = True
        await serving


async def _open(options: Options, stopping: Signals) -> Assembly | None:
    """The engine and the app; None if a signal came first."""
    from serve_llm.server.assemble import assemble

    assembling = asyncio.ensure_future(assemble(options))
    await _first_of(assembling, stopping.first)
    if assembling.done():
        return assembling.result()
    assembling.cancel()
    await asyncio.wait([assembling])
    return None


async def _until_stopped(opened: Assembly, drain_seconds: float, stopping: Signals) -> int:
    gate = opened.gate
    watching = asyncio.ensure_future(opened.supervisor.watch())
    await _first_of(watching, stopping.first)
    if watching.done():
        raise watching.result()
    gate.draining = True
    logger.info("Stopping: %d open requests may finish; a second signal ends them", gate.num_open)
    draining = asyncio.ensure_future(gate.drained())
    await _first_of(draining, watching, stopping.second, seconds=drain_seconds)
    watching.cancel()
    if not draining.done():
        logger.warning("Ending %d open requests", gate.num_open)
        gate.end_open()
        await _first_of(draining, seconds=QUICK_SECONDS)
        draining.cancel()
    return 0


async def _first_of(*futures: asyncio.Future[Any], seconds: float | None = None) -> None:
    await asyncio.wait(futures, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)


class Signals:
    """SIGINT and SIGTERM as two futures: drain, and end at once."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._came)

    def _came(self) -> None:
        for future in (self.first, self.second):
            if not future.done():
                future.set_result(None)
                return


if __name__ == "__main__":
    sys.exit(main())
