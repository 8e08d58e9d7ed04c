"""Responses to hosts that want to join, and streams that end before they are connected."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from serve_llm.cli.front_end import read_options
from serve_llm.common.curve_zmq import CurveClient, format_url
from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import make_options
from serve_llm.server.front_ends import background, process, tunnel
from serve_llm.server.front_ends.gateway import OTHER_VERSION, FrontEndGateway, JoinedHost, RemoteFrontEnd
from serve_llm.server.front_ends.group import FrontEndGroup
from serve_llm.server.front_ends.messages import Activate, Adapters, compute_protocol
from serve_llm.server.front_ends.tunnel import (
    REPORT_BYTES,
    WINDOW_BYTES,
    LocalStream,
    StreamData,
    StreamEnd,
    StreamRead,
    compute_join_protocol,
)
from serve_llm.server.metrics.meter import Clock
from support.nodes import free_port

SECRET = "s3cret"
UNKNOWN = tunnel.Refused("the server does not know this host")


def ask(port: int, content: bytes) -> tunnel.ToHost:
    client = CurveClient(format_url("127.0.0.1", port), SECRET)
    try:
        client.send(content)
        answer = client.receive(30.0)
        assert answer is not None
        return tunnel.decode_to_host(answer)
    finally:
        client.close()


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (tunnel.encode(tunnel.Join(compute_join_protocol())), tunnel.Welcome("org/model", "v1")),
        (tunnel.encode(tunnel.Join("other")), OTHER_VERSION),
        (tunnel.encode(tunnel.Join(compute_protocol())), OTHER_VERSION),  # its streams may differ
        (b"\x93\x01\x02\x03", OTHER_VERSION),
        (tunnel.encode(tunnel.Keepalive()), UNKNOWN),
        (tunnel.encode(StreamData(-1, b"GET / HTTP/1.1\r\n\r\n")), UNKNOWN),
    ],
)
def test_answers(content: bytes, answer: tunnel.ToHost) -> None:
    port = free_port()

    async def scenario() -> tunnel.ToHost:
        options = make_options("org/model", revision="v1", front_end_addr=f"127.0.0.1:{port}", cluster_secret=SECRET)
        gateway = FrontEndGateway(options, cast(FrontEndGroup, SimpleNamespace()))
        try:
            return await asyncio.to_thread(ask, port, content)
        finally:
            await gateway.stop()

    assert asyncio.run(scenario()) == answer


def test_a_stream_is_written_and_closed_before_it_is_connected() -> None:
    async def scenario() -> bytes:
        sent: list[StreamData | StreamRead] = []
        stream = LocalStream(3, sent.append)
        stream.write(b"a")
        stream.write(b"b")
        stream.close()
        own_end, their_end = socket.socketpair()
        await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=own_end)
        await stream.closed.wait()
        stream.write(b"too late")
        with their_end:
            assert sent == []
            return their_end.recv(10)

    assert asyncio.run(scenario()) == b"ab"


def test_a_clock_of_another_host() -> None:
    before: Any = time.perf_counter()
    clock = Clock.running_from(before + 1000.0)
    assert 0 <= clock.read() - before - 1000.0 <= time.perf_counter() - before


def test_what_comes_late_for_a_request_opens_no_connection(tmp_path: Path) -> None:
    """A server may answer and close before a body has ended, for example if the body is too large."""

    async def scenario() -> int:
        path = f"{tmp_path}/server"
        num_connections = 0

        def serve() -> asyncio.Protocol:
            nonlocal num_connections
            num_connections += 1
            return asyncio.Protocol()

        server = await asyncio.get_running_loop().create_unix_server(serve, path)
        sent: list[tunnel.ToHost] = []
        host = JoinedHost(tunnel.Ready("other", 1, "/model", "/there", None, None), sent.append, path)
        host.receive(StreamData(-1, b"first"))
        host.receive(StreamEnd(-1))
        host.receive(StreamData(-1, b"late"))
        host.receive(StreamData(-2, b"another"))
        host.close("the end of the test")
        await asyncio.gather(*host._carrying)
        server.close()
        assert StreamEnd(-1) not in sent, "the host knows"
        return num_connections

    assert asyncio.run(scenario()) == 2


async def connect_stream() -> tuple[LocalStream, list[StreamData | StreamRead], socket.socket]:
    """Return a stream, what it sends to the other host, and the other end of its local connection."""
    sent: list[StreamData | StreamRead] = []
    stream = LocalStream(-1, sent.append)
    own_end, their_end = socket.socketpair()
    their_end.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: stream, sock=own_end)
    return stream, sent, their_end


def test_a_stream_reads_no_more_than_the_other_host_takes() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        stream, sent, their_end = await connect_stream()
        content = bytes(4 * WINDOW_BYTES)
        writing = asyncio.ensure_future(loop.sock_sendall(their_end, content))

        def count() -> int:
            return sum(len(message.content) for message in sent if isinstance(message, StreamData))

        while count() < WINDOW_BYTES:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert not writing.done() and count() < 2 * WINDOW_BYTES
        num_taken = 0
        while count() < len(content):
            stream.note_read(count() - num_taken)
            num_taken = count()
            await asyncio.sleep(0)
        await writing
        their_end.close()
        await stream.closed.wait()

    asyncio.run(scenario())


def test_a_stream_reports_what_its_connection_takes() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        stream, sent, their_end = await connect_stream()
        part = bytes(REPORT_BYTES)
        for _ in range(8):
            stream.write(part)

        def count() -> int:
            return sum(message.num_bytes for message in sent if isinstance(message, StreamRead))

        assert count() <= REPORT_BYTES, "the reader takes nothing"
        num_read = 0
        while num_read < 8 * REPORT_BYTES:
            num_read += len(await loop.sock_recv(their_end, 2**20))
        while count() < 8 * REPORT_BYTES:
            await asyncio.sleep(0)
        assert count() == 8 * REPORT_BYTES
        stream.abort()
        await stream.closed.wait()
        their_end.close()

    asyncio.run(scenario())


def test_a_forwarded_answer_waits_for_the_client(tmp_path: Path) -> None:
    """The server's connection has a reader that does not read, and its usual timeout ends the answer."""

    async def scenario() -> None:
        paused = asyncio.Event()

        class Answer(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                assert isinstance(transport, asyncio.Transport)
                transport.write(bytes(8 * WINDOW_BYTES))

            def pause_writing(self) -> None:
                paused.set()

        path = f"{tmp_path}/server"
        server = await asyncio.get_running_loop().create_unix_server(Answer, path)
        sent: list[tunnel.ToHost] = []
        host = JoinedHost(tunnel.Ready("other", 1, "/model", "/there", None, None), sent.append, path)
        host.receive(StreamData(-1, b"GET"))
        await paused.wait()
        for _ in range(200):
            await asyncio.sleep(0)
        num_sent = sum(len(message.content) for message in sent if isinstance(message, StreamData))
        assert WINDOW_BYTES <= num_sent < 2 * WINDOW_BYTES
        host.receive(StreamRead(-1, num_sent))
        while sum(len(message.content) for message in sent if isinstance(message, StreamData)) == num_sent:
            await asyncio.sleep(0)
        host.close("the end of the test")
        await asyncio.gather(*host._carrying)
        server.close()

    asyncio.run(scenario())


def test_a_front_end_that_does_not_read_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "MAX_UNREAD_BYTES", 1000)
    message = Adapters(1, {})

    async def scenario() -> None:
        sent: list[tunnel.ToHost] = []
        front_end = RemoteFrontEnd(7, 0, sent.append)
        await front_end.connect(lambda _: None)
        ending = asyncio.ensure_future(front_end.wait())

        def count() -> int:
            return sum(len(one.content) for one in sent if isinstance(one, StreamData))

        while count() <= 1000:
            front_end.send(message)
        front_end.note_read(count())
        front_end.send(message)
        assert not any(isinstance(one, tunnel.Kill) for one in sent), "it has read"
        while not any(isinstance(one, tunnel.Kill) for one in sent):
            front_end.send(message)
        assert sent[-1] == tunnel.Kill(7) and count() < 3000
        front_end.send(Activate())
        assert sent[-1] == tunnel.Kill(7), "nothing follows"
        assert await ending == "a kill"

    asyncio.run(scenario())
    assert "has left 0 MiB unread and is killed" in caplog.text


class FakeGroup:
    def __init__(self) -> None:
        self.server_socket = "/server"
        self.hosts: list[Any] = []

    def add_host(self, host: JoinedHost) -> None:
        self.hosts.append(host)

    def remove_host(self, host: JoinedHost) -> None:
        self.hosts.remove(host)


def test_an_error_ends_the_host_whose_message_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    receive = JoinedHost.receive

    def fail(host: JoinedHost, message: tunnel.FromHost) -> None:
        if isinstance(message, tunnel.FrontEndStarted):
            raise ValueError("a bug")
        receive(host, message)

    monkeypatch.setattr(JoinedHost, "receive", fail)

    def join(group: FakeGroup) -> None:
        clients = [CurveClient(format_url("127.0.0.1", port), SECRET) for _ in range(2)]
        for number, client in enumerate(clients):
            client.send(tunnel.encode(tunnel.Ready(f"host {number}", 1, "/model", "/there", None, None)))
            answer = client.receive(30.0)
            assert answer is not None and tunnel.decode_to_host(answer) == tunnel.Keepalive()
        clients[0].send(tunnel.encode(tunnel.FrontEndStarted(1, 1)))
        while (answer := clients[0].receive(30.0)) is not None:
            if isinstance(tunnel.decode_to_host(answer), tunnel.Refused):
                break
        assert tunnel.decode_to_host(answer or b"") == tunnel.Refused("an error in the server")
        assert [host.name for host in group.hosts] == ["host 1"]
        for client in clients:
            client.close()

    async def scenario() -> None:
        group = FakeGroup()
        options = make_options("demo", front_end_addr=f"127.0.0.1:{port}", cluster_secret=SECRET)
        gateway = FrontEndGateway(options, cast(FrontEndGroup, group))
        try:
            await asyncio.to_thread(join, group)
        finally:
            await gateway.stop()

    asyncio.run(scenario())
    assert "A message of a host of front ends failed: FrontEndStarted" in caplog.text and "a bug" in caplog.text


def test_a_loop_begins_again_after_an_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(background, "PAUSE_SECONDS", 0.0)
    num_calls = 0

    async def loop() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 3:
            raise OSError("the cause")
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(background.keep_running(loop, "does something"))
    assert num_calls == 3 and caplog.text.count("OSError: the cause") == 2
    assert "An error stopped the server's loop that does something; it starts again" in caplog.text


def test_options_of_the_command() -> None:
    environ = {"SERVE_LLM_CLUSTER_SECRET": SECRET}
    options = read_options(["10.0.0.1:29700", "--front-ends", "4", "--model", "/model"], environ)
    assert (options.front_end_addr, options.front_ends, options.model) == ("10.0.0.1:29700", 4, "/model")
    assert (options.cluster_secret, options.host, options.port) == (SECRET, "127.0.0.1", 8000)
    assert read_options(["10.0.0.1:29700"], environ).model == ""
    for wrong, message in (
        (["10.0.0.1"], "expected host:port"),
        (["h:1", "--port", "70000"], "--port"),
        (["h:1", "--front-ends", "65"], "--front-ends"),
        (["h:1", "--ssl-keyfile", "k"], "--ssl-keyfile and --ssl-certfile must be given together"),
        (["h:1", "--max-model-len", "9"], "unknown option --max-model-len"),
    ):
        with pytest.raises(OptionError, match=message):
            read_options(wrong, environ)
    with pytest.raises(OptionError, match=r"^--cluster-secret \(SERVE_LLM_CLUSTER_SECRET\) is missing"):
        read_options(["h:1"], {})
