"""Stopping the HTTP server without polling ten times a second, idle connections, and its reserve of open files."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import resource
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from serve_llm.common.options.sources import make_options
from serve_llm.server.http import connection, file_reserve
from serve_llm.server.http.connection import AsgiApp, Connection, HttpServer, Message, Receive, Send
from serve_llm.server.http.file_reserve import ReservedFiles, find_reserved_files
from serve_llm.server.http.parser import RequestParser
from serve_llm.server.http.startup_app import StartupApp


@asynccontextmanager
async def running(app: AsgiApp | None = None) -> AsyncIterator[tuple[HttpServer, tuple[str, int]]]:
    """Serve until the end of the context. Yields the server and its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = HttpServer(app or StartupApp(with_page=False), make_options("demo").limits, None, None)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        yield server, listener.getsockname()
        if not server.should_exit:
            server.should_exit = True
        await asyncio.wait_for(serving, 60)


@pytest.mark.parametrize("from_thread", [False, True])
def test_it_ends_when_asked_in_any_thread(monkeypatch: pytest.MonkeyPatch, from_thread: bool) -> None:
    monkeypatch.setattr(connection, "TICK_SECONDS", 3600.0)

    async def scenario() -> None:
        async with running() as (server, address):
            reader, writer = await asyncio.open_connection(*address)
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

    asyncio.run(scenario())


def test_whitespace_around_a_header_is_no_part_of_its_value() -> None:
    found: list[tuple[bytes, bytes]] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        found.extend(scope["headers"])
        await StartupApp(with_page=False)(scope, receive, send)

    async def scenario() -> None:
        async with running(app) as (_, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /health HTTP/1.1\r\nx-api-key: \t a key \t \r\nempty:  \r\nconnection: close \r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(scenario())
    assert found == [(b"x-api-key", b"a key"), (b"empty", b""), (b"connection", b"close")]


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\nupgrade: h2c\r\n"
CHUNKED = b"POST /a?b HTTP/1.1\r\nhost: x\r\n" + OFFER + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
SIZED = b"POST /a?b HTTP/1.1\r\nhost: x\r\n" + OFFER + b"content-length: 2\r\n\r\n{}"
WEBSOCKET = (
    b"POST /a?b HTTP/1.1\r\nconnection: keep-alive, upgrade\r\nupgrade: websocket\r\ncontent-length: 2\r\n\r\n{}"
)


@pytest.mark.parametrize("size", [1, 60, 10_000])
@pytest.mark.parametrize("sent", [SIZED, CHUNKED, WEBSOCKET, SIZED * 3], ids=["sized", "chunked", "websocket", "three"])
def test_offers_of_other_protocols_are_ignored(sent: bytes, size: int) -> None:
    """Java's HttpClient offers HTTP/2 with its first request, and sends the body with it."""
    found: list[tuple[str, str, bytes, dict[bytes, bytes]]] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        body = b""
        while (message := await receive()) and message["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        found.append((scope["method"], scope["path"], body, dict(scope["headers"])))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    last = b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"

    async def scenario() -> bytes:
        async with running(app) as (_, address):
            reader, writer = await asyncio.open_connection(*address)
            whole = sent + last
            for start in range(0, len(whole), size):
                writer.write(whole[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(scenario()).count(b"HTTP/1.1 200 OK") == len(found)
    *offered, closing = found
    assert closing[:3] == ("GET", "/last", b"") and len(offered) == sent.count(b"POST")
    for method, path, body, headers in offered:
        assert (method, path, body) == ("POST", "/a", b"{}")
        assert not headers.keys() & {b"upgrade", b"http2-settings"} and b"pgrade" not in headers[b"connection"]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_the_last_request_of_a_connection_may_offer_another_protocol(version: bytes) -> None:
    async def scenario() -> None:
        async with running() as (_, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(
                b"GET /health HTTP/%s\r\nhost: x\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n\r\n" % version
            )
            assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(scenario())


def test_thousands_of_offers_at_once() -> None:
    request = SimpleNamespace(url=b"/", headers=[], on_message_begin=lambda: request.headers.clear(), ended=0)
    request.on_header = lambda name, value: request.headers.append((name.lower(), value))

    def on_message_complete() -> None:
        request.ended += not parser.should_upgrade()

    request.on_message_complete = on_message_complete
    parser = RequestParser(request)
    parser.feed_data(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 3000)
    assert request.ended == 3000


def test_a_proxy_is_not_here() -> None:
    async def scenario() -> None:
        async with running() as (_, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400")
            writer.close()

    asyncio.run(scenario())


def test_an_idle_connection_outlives_those_of_load_balancers_but_ends_with_a_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "DRAIN_IDLE_SECONDS", 0.0)

    async def scenario() -> None:
        async with running() as (server, address):
            assert server.config.timeout_keep_alive > 60
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r\n0\r\n\r\n")
            server.stop_accepting()
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()

    asyncio.run(scenario())


def test_a_connection_that_is_busy_when_a_drain_begins_closes_after_its_response() -> None:
    has_begun = asyncio.Event()
    may_end = asyncio.Event()

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        has_begun.set()
        await may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def scenario() -> None:
        async with running(app) as (server, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await has_begun.wait()
            server.stop_accepting()
            may_end.set()
            answer = await asyncio.wait_for(reader.read(), 60)
            assert b"connection: close" in answer and answer.endswith(b"ok")
            writer.close()

    asyncio.run(scenario())


def test_a_lost_connection_leaves_no_timer() -> None:
    async def scenario() -> bool:
        async with running() as (server, address):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r\n0\r\n\r\n")
            (connection,) = server.server_state.connections
            assert isinstance(connection, Connection) and connection.timeout_keep_alive_task is not None
            connection.connection_lost(ConnectionResetError())
            writer.close()
        return connection.timeout_keep_alive_task is None

    assert asyncio.run(scenario())


@pytest.mark.parametrize(
    ("limit", "reserved"),
    [
        (64, ReservedFiles(48, 56)),
        (1024, ReservedFiles(768, 896)),
        (65536, ReservedFiles(65280, 65408)),
        (resource.RLIM_INFINITY, ReservedFiles(math.inf, math.inf)),
    ],
)
def test_part_of_the_files_is_reserved(limit: int, reserved: ReservedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert find_reserved_files() == reserved


@pytest.mark.parametrize("reserved", [ReservedFiles(0, math.inf), ReservedFiles(0, 0)], ids=["refused", "dropped"])
def test_a_connection_that_would_take_a_reserved_file_is_closed(
    reserved: ReservedFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(file_reserve, "find_reserved_files", lambda: reserved)

    async def scenario() -> list[bytes]:
        async with running() as (_, address):
            answers = []
            for _ in range(2):
                reader, writer = await asyncio.open_connection(*address)
                try:
                    answers.append(await reader.read())
                except ConnectionResetError:
                    answers.append(b"")
                writer.close()
        return answers

    answers = asyncio.run(scenario())
    if reserved.dropped_from == 0:
        assert answers == [b"", b""]
    else:
        assert all(answer.startswith(b"HTTP/1.1 503") for answer in answers)
        error = json.loads(answers[0].partition(b"\r\n\r\n")[2])["error"]
        assert error["message"] == "the server has too many open connections"
    assert caplog.text.count("Connections are refused") == 1, "the log is not flooded"


@pytest.mark.parametrize("leaves_early", [False, True])
def test_requests_and_connections_need_no_garbage_collection(leaves_early: bool) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"

    async def scenario() -> tuple[int, int]:
        async with running() as (server, address):
            reader, writer = await asyncio.open_connection(*address)
            for _ in range(3):  # on one connection
                writer.write(request)
                await reader.readuntil(b'{"status":"ok"}')
            num_cycles = _count(RequestResponseCycle)
            if leaves_early:
                writer.write(request)
            writer.close()
            while server.server_state.connections:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            num_left = _count(Connection, RequestResponseCycle)
        return num_cycles, num_left

    gc.collect()
    gc.disable()
    try:
        num_before = _count(Connection, RequestResponseCycle)  # those of earlier tests
        num_cycles, num_left = asyncio.run(scenario())
        assert (num_cycles <= num_before + 1, num_left) == (True, num_before)
    finally:
        gc.enable()


def _count(*kinds: type) -> int:
    """Count without `isinstance`, which runs code of other objects."""
    return sum(type(one) in kinds for one in gc.get_objects())
