"""Keys from secrets, which peers are accepted, and how each end notices that the other is gone."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from serve_llm.common import curve_zmq
from serve_llm.common.curve_zmq import PING, CurveClient, Endpoint, create_dealer, derive_key, format_url, send
from serve_llm.common.errors import OptionError, PeerLost
from serve_llm.common.hosts import list_addresses

LIMIT = 60.0


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint("127.0.0.1", "secret")
    yield made
    made.close()
    made.close()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_key_follows_from_the_secret_alone() -> None:
    assert derive_key("a") == derive_key("a") != derive_key("b")
    assert len({derive_key(secret).public for secret in ("", "a", "\u00e4")}) == 3
    assert zmq.curve_public(derive_key("").secret) == derive_key("").public


def test_urls() -> None:
    assert format_url("10.0.0.1", 5) == "tcp://10.0.0.1:5"
    assert format_url("fd00::1", 5) == "tcp://[fd00::1]:5"


def test_messages_both_ways_and_pings_are_not_seen(endpoint: Endpoint) -> None:
    router, url = endpoint.listen()
    line = CurveClient(url, "secret")
    assert not line.connected and line.receive(0) is None
    line.send(b"hello")
    peer, message = router.recv_multipart()
    assert message == b"hello"
    large = bytes(range(256)) * 20_000
    for sent in (b"a", PING, large):
        assert send(router, peer, sent)
    assert line.receive(LIMIT) == b"a" and line.receive(LIMIT) == large
    assert line.connected and line.receive(0) is None
    line.close()


def test_over_ipv6() -> None:
    if "::1" not in list_addresses():
        pytest.skip("this machine has no IPv6")
    endpoint = Endpoint("::1", "secret")
    router, url = endpoint.listen()
    assert url.startswith("tcp://[::1]:")
    line = CurveClient(url, "secret")
    line.send(b"hello")
    assert router.poll(LIMIT * 1000) and router.recv_multipart()[1] == b"hello"
    line.close()
    endpoint.close()


def test_what_was_sent_before_there_was_anybody_arrives() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    line = CurveClient(f"tcp://127.0.0.1:{port}", "secret")
    line.send(b"early")
    assert line.receive(0.3) is None and not line.connected
    endpoint = Endpoint("127.0.0.1", "secret")
    router, _ = endpoint.listen(port)
    assert router.poll(LIMIT * 1000) and router.recv_multipart()[1] == b"early"
    endpoint.close()
    line.close()


def test_another_secret_is_refused_and_the_others_are_not_disturbed(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve_zmq, "REFUSED_SECONDS", 1.0)
    router, url = endpoint.listen()
    with_secret, without = CurveClient(url, "secret"), CurveClient(url, "")
    without.send(b"let me in")
    with pytest.raises(OptionError, match=r"127\.0\.0\.1:\d+ refuses the connection: --cluster-secret"):
        without.receive(LIMIT)
    with_secret.send(b"me")
    assert router.recv_multipart()[1] == b"me" and not router.poll(0)
    for line in (with_secret, without):
        line.close()


def test_knowing_the_servers_key_is_not_enough(endpoint: Endpoint) -> None:
    """Clients must own the secret key as well."""
    router, url = endpoint.listen()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stranger = create_dealer(context, url, "secret")
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    stranger.connect(url)
    stranger.send(b"let me in")
    assert monitor.poll(LIMIT * 1000) and not router.poll(0)
    stranger.disable_monitor()
    context.destroy(linger=0)


def test_without_encryption_nobody_is_heard(endpoint: Endpoint) -> None:
    router, url = endpoint.listen()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plain = context.socket(zmq.DEALER)
    monitor = plain.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_DISCONNECTED)
    plain.connect(url)
    plain.send(b"let me in")
    assert monitor.poll(LIMIT * 1000) and not router.poll(0)
    plain.disable_monitor()
    context.destroy(linger=0)


def test_each_end_notices_that_the_other_has_gone() -> None:
    endpoint = Endpoint("127.0.0.1", "secret")
    router, url = endpoint.listen()
    lines = [CurveClient(url, "secret") for _ in range(2)]
    peers = []
    for line in lines:
        line.send(b"x")
        peers.append(router.recv_multipart()[0])
    lines[0].close()
    until(lambda: not send(router, peers[0], PING))
    assert send(router, peers[1], b"last word")
    endpoint.close()
    assert lines[1].receive(LIMIT) == b"last word"
    with pytest.raises(PeerLost, match=r"the connection to 127\.0\.0\.1:\d+ is lost"):
        lines[1].receive(LIMIT)
    lines[1].close()


def test_a_peer_that_says_nothing_any_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its host is switched off: no connection is closed."""
    monkeypatch.setattr(curve_zmq, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(curve_zmq, "LOST_SECONDS", 0.8)
    endpoint = Endpoint("127.0.0.1", "secret")
    router, url = endpoint.listen()
    program = f"""
import time
from serve_llm.common.curve_zmq import CurveClient
line = CurveClient({url!r}, "secret")
line.send(b"x")
while True:
    time.sleep(1)  # computes: it need not look at its connection to be alive
"""
    process = subprocess.Popen([sys.executable, "-P", "-c", program])
    try:
        peer, _ = router.recv_multipart()
        began = time.monotonic()
        while time.monotonic() < began + 2:
            assert send(router, peer, PING)
            time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        until(lambda: not send(router, peer, PING))
    finally:
        process.kill()
        process.wait()
        endpoint.close()


def test_a_port_that_is_taken(endpoint: Endpoint) -> None:
    _, url = endpoint.listen()
    with pytest.raises(OptionError, match=r"cannot listen on 127\.0\.0\.1 port \d+ for the other hosts: Address"):
        endpoint.listen(int(url.rpartition(":")[2]))
