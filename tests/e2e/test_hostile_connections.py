"""Clients that misuse a connection: long headers, silence, unread answers; and TLS, on a real socket."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.daemon import Daemon


@pytest.fixture(scope="module")
def strict() -> Iterator[Daemon]:
    limits = ["stall-seconds=1", "header-bytes=4KiB", "body-bytes=1MiB"]
    with Daemon("demo", *(part for limit in limits for part in ("--limit", limit))) as daemon:
        daemon.wait_until_serving()
        yield daemon


def connect(daemon: Daemon, receive_buffer: int | None = None) -> socket.socket:
    host, port = daemon.url.removeprefix("http://").split(":")
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(30)
    client.connect((host, int(port)))
    return client


def read_all(client: socket.socket) -> bytes:
    received = b""
    try:
        while data := client.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def wait_until_idle(daemon: Daemon, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while daemon.metrics()["serve_llm_num_requests_running"]:
        assert time.monotonic() < deadline, "requests run on"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "header",
    [
        b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /?" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 5000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 5000,  # without an end
    ],
)
def test_a_long_header_is_431(strict: Daemon, header: bytes) -> None:
    with connect(strict) as client:
        client.sendall(header)
        if header.endswith(b"\r\n\r\n"):
            client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 431 "), answer[:100]
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "header_too_large"


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def refusal(answer: bytes) -> tuple[int, str | None]:
    """Return (status, code) of an answer in the common error format."""
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head[9:12]), error["code"]


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n"])
def test_a_client_that_sends_nothing_is_let_go(strict: Daemon, sent: bytes) -> None:
    with connect(strict) as client:
        if sent:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"ok"}'):
                answer += client.recv(65536)
        client.sendall(sent)
        assert read_all(client) == b""


@pytest.mark.parametrize(
    "sent", [b"GET /hea", POST + b"Content-Length: 100\r\n\r\n{", POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"]
)
def test_a_client_that_falls_silent_is_told_so(strict: Daemon, sent: bytes) -> None:
    with connect(strict) as client:
        client.sendall(sent)
        assert refusal(read_all(client)) == (408, "request_stalled")


def test_a_body_that_trickles_is_refused(strict: Daemon) -> None:
    with connect(strict) as client:
        client.sendall(POST + b"Content-Length: 1000000\r\n\r\n")
        client.settimeout(0.05)
        answer = b""
        for _ in range(200):
            try:
                client.sendall(b" ")
                if data := client.recv(65536):
                    answer += data
                else:
                    break
            except TimeoutError:
                pass
            except OSError:
                break
        assert refusal(answer) == (408, "request_stalled")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"NONSENSE / HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        POST + b"Content-Length: x\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"X: a\x00b\r\n\r\n",
    ],
)
def test_what_is_not_http_is_answered_like_any_error(strict: Daemon, sent: bytes) -> None:
    with connect(strict) as client:
        client.sendall(sent)
        assert refusal(read_all(client)) == (400, None)


@pytest.mark.parametrize("stream", [True, False])
def test_an_old_client_gets_no_chunks(strict: Daemon, stream: bool) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 4, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
    with connect(strict) as client:
        client.sendall(head.encode() + body)
        received_head, _, content = read_all(client).partition(b"\r\n\r\n")
    assert b" 200 " in received_head and b"connection: close" in received_head.lower()
    assert b"transfer-encoding" not in received_head.lower()
    if stream:
        events = content.removesuffix(b"\n\n").split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events) and events[-1] == b"data: [DONE]"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
    else:
        assert f"content-length: {len(content)}".encode() in received_head and json.loads(content)["usage"]


def test_trailers_count_as_header(strict: Daemon) -> None:
    with connect(strict) as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 2000)
        assert refusal(read_all(client)) == (431, "header_too_large")


@pytest.mark.parametrize("close", [b"", b"Connection: close\r\n"])
def test_the_answer_to_an_enormous_body_is_read(strict: Daemon, close: bytes) -> None:
    with connect(strict) as client:
        client.sendall(POST + close + b"Content-Length: 16000000\r\n\r\n")
        client.sendall(b"x" * 16_000_000)  # all of it, more than the sockets hold, before reading the answer
        answer = client.recv(65536)
        assert refusal(answer) == (413, "body_too_large")


@pytest.mark.slow
def test_a_body_without_end_is_cut_off(strict: Daemon) -> None:
    with connect(strict) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        with pytest.raises(OSError):
            while True:
                client.sendall(chunk)


def generate(max_tokens: int) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": max_tokens, "n": 8, "ignore_eos": True, "stream": True}).encode()
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_a_client_that_leaves_ends_all_that_it_asked_for(strict: Daemon) -> None:
    before = strict.metrics()["serve_llm_generation_tokens_total"]
    with connect(strict) as client:
        client.sendall(generate(1900) * 3)  # the second and third wait for the first
        assert client.recv(65536)
    wait_until_idle(strict)
    assert strict.metrics()["serve_llm_generation_tokens_total"] - before < 8 * 1900


@pytest.mark.slow
def test_a_client_that_does_not_read_is_let_go_and_costs_little(strict: Daemon) -> None:
    body = json.dumps(
        {"prompt": "def", "max_tokens": 1900, "ignore_eos": True, "stream": True, "n": 8, "logprobs": 7}
    ).encode()
    before = psutil.Process(strict.process.pid).memory_info().rss
    with connect(strict, receive_buffer=4096) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        strict.wait_until_logged("the client did not read its answer")
    wait_until_idle(strict)
    assert psutil.Process(strict.process.pid).memory_info().rss < before + 100 * 2**20
    with urllib.request.urlopen(strict.url + "/ready", timeout=10) as answer:
        assert answer.status == 200


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Return (key, certificate) for 127.0.0.1, self-signed."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return key, cert


def test_https(certificate: tuple[Path, Path]) -> None:
    key, cert = certificate
    with Daemon("demo", "--ssl-keyfile", str(key), "--ssl-certfile", str(cert)) as daemon:
        url = daemon.wait_until_serving()
        assert url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(cert))
        body = json.dumps({"prompt": "import", "max_tokens": 4, "stream": True}).encode()
        request = urllib.request.Request(url + "/v1/completions", body)
        with urllib.request.urlopen(request, timeout=30, context=trusting) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(OSError):  # fails without TLS
            urllib.request.urlopen("http" + url.removeprefix("https") + "/health", timeout=10)
    key.write_text("not a key")
    with Daemon("demo", "--ssl-keyfile", str(key), "--ssl-certfile", str(cert)) as daemon:
        assert daemon.wait() == 2 and daemon.log[-1].startswith("serve-llm: --ssl-keyfile")
