"""Stopping the HTTP server without the base class's polling ten times a second, and idle connections."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from serve_llm.common.options.sources import make_options
from serve_llm.server.http import connection
from serve_llm.server.http.connection import HttpServer, StartupApp


@pytest.mark.parametrize("from_thread", [False, True])
def test_it_ends_when_asked_in_any_thread(monkeypatch: pytest.MonkeyPatch, from_thread: bool) -> None:
    monkeypatch.setattr(connection, "TICK_SECONDS", 3600.0)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = HttpServer(StartupApp(with_page=False), make_options("demo").limits, None, None)
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200") and b"\r\ndate: " in answer
            writer.close()
            if from_thread:
                thread = threading.Thread(target=setattr, args=(server, "should_exit", True))
                thread.start()
                thread.join()
            else:
                server.should_exit = True
            await asyncio.wait_for(serving, 60)

    asyncio.run(scenario())


def test_an_idle_connection_outlives_those_of_load_balancers_but_ends_with_a_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "DRAIN_IDLE_SECONDS", 0.0)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = HttpServer(StartupApp(with_page=False), make_options("demo").limits, None, None)
            assert server.config.timeout_keep_alive > 60
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r\n0\r\n\r\n")
            server.stop_accepting()
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
            server.should_exit = True
            await asyncio.wait_for(serving, 60)

    asyncio.run(scenario())
