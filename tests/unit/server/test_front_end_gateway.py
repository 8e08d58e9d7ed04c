"""What the server answers to hosts that want to join, and streams that end before they are connected."""

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
from serve_llm.server.front_ends import tunnel
from serve_llm.server.front_ends.gateway import OTHER_VERSION, FrontEndGateway, JoinedHost
from serve_llm.server.front_ends.group import FrontEndGroup
from serve_llm.server.front_ends.messages import compute_protocol
from serve_llm.server.front_ends.tunnel import LocalStream, StreamData, StreamEnd
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
        (tunnel.encode(tunnel.Join(compute_protocol())), tunnel.Welcome("org/model", "v1")),
        (tunnel.encode(tunnel.Join("other")), OTHER_VERSION),
        (b"\x93\x01\x02\x03", OTHER_VERSION),
        (tunnel.encode(tunnel.Beat()), UNKNOWN),
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
        sent: list[StreamData | StreamEnd] = []
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
    """A server may answer and close before a body has ended, such as one that is too large."""

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
