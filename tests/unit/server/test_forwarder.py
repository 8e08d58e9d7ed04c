"""What a front end answers when the request that it forwards gets no complete response."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from serve_llm.server.front_ends.forwarder import Forwarder

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SCOPE: dict[str, Any] = {"type": "http", "method": "GET", "path": "/status", "query_string": b"", "headers": []}


async def unused(*_: object) -> None:
    raise AssertionError("the request is forwarded")


def forward(path: Path, serve: Serve, leaves: bool) -> list[dict[str, Any]]:
    """Return the messages to the client. leaves: the client disconnects as soon as the request has arrived."""
    sent: list[dict[str, Any]] = []

    async def run() -> None:
        arrived = asyncio.Event()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            arrived.set()
            await serve(reader, writer)
            writer.close()

        messages = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await arrived.wait()
            if not leaves:
                await asyncio.get_running_loop().create_future()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        async with await asyncio.start_unix_server(handle, path):
            await asyncio.wait_for(Forwarder(unused, ("/status",), str(path))(SCOPE, receive, send), 60)

    asyncio.run(run())
    return sent


async def wait_for_the_end(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def end_at_once(*_: object) -> None:
    pass


async def end_in_between(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")


def test_a_client_that_leaves_is_no_error(tmp_path: Path) -> None:
    assert forward(tmp_path / "socket", wait_for_the_end, leaves=True) == []


def test_without_any_response_the_client_may_retry(tmp_path: Path) -> None:
    start, body = forward(tmp_path / "socket", end_at_once, leaves=False)
    assert start["status"] == 503 and (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["message"] == "the server ended before it answered"


def test_the_client_may_retry_if_the_request_was_not_even_read(tmp_path: Path) -> None:
    """A server process that is killed then resets the connection."""
    sent: list[dict[str, Any]] = []

    def close_unread(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.recv(1, socket.MSG_PEEK)  # the request has arrived
        connection.close()

    async def run() -> None:
        messages = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            sent.append(message)

        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "socket"))
            listener.listen()
            closing = asyncio.create_task(asyncio.to_thread(close_unread, listener))
            await Forwarder(unused, ("/status",), str(tmp_path / "socket"))(SCOPE, receive, send)
            await closing

    asyncio.run(asyncio.wait_for(run(), 60))
    assert sent[0]["status"] == 503


def test_half_a_response_ends_the_connection(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError):
        forward(tmp_path / "socket", end_in_between, leaves=False)
