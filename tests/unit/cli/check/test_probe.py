"""Two servers on the loopback interface; faults of real networks are in tests/e2e/test_check.py."""

from __future__ import annotations

import socket
import time

import msgspec
import pytest

from serve_llm.cli.check import probe
from serve_llm.cli.check.host import HostReport, inspect_host


def host(rank: int, port: int) -> HostReport:
    return inspect_host(rank, "127.0.0.1", port, None)


def test_reach_and_speed() -> None:
    servers = [probe.ProbeServer("127.0.0.1") for _ in range(2)]
    first, second = (host(rank, server.port) for rank, server in enumerate(servers))
    assert (
        probe.reach_all(first, [second]) == [probe.Reachability(source=0, target=1)]
        and probe.reach_all(first, []) == []
    )
    found = probe.measure_speed(first, second, 0.02)
    assert not found.failure and 0 < found.latency_us < 1e6 and found.bandwidth > 1e6


def test_nobody_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = host(1, unused.getsockname()[1])
        assert probe.reach_all(host(0, 1), [target]) == [probe.Reachability(source=0, target=1, failure="refused")]
        assert probe.measure_speed(host(0, 1), target).failure == "refused"


def test_datagrams_are_heard() -> None:
    servers = [probe.ProbeServer("127.0.0.1") for _ in range(3)]
    reports = [host(rank, server.port) for rank, server in enumerate(servers)]
    servers[0].send_hello(0, reports[1:])
    servers[2].send_hello(2, reports[1:2])
    deadline = time.monotonic() + 10
    while servers[1].heard != {0, 2} or servers[2].heard != {0}:
        assert time.monotonic() < deadline, (servers[1].heard, servers[2].heard)
        time.sleep(0.01)
    assert servers[0].heard == set()


@pytest.mark.slow
def test_silent_host_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and never answers
        monkeypatch.setattr(probe, "EXCHANGE_SECONDS", 0.05)
        (found,) = probe.reach_all(host(0, 1), [host(1, silent.getsockname()[1])])
    assert found.failure == "timeout"


def test_report_of_this_host() -> None:
    report = host(3, 5)
    assert report.interface == "lo" and report.mtu > 1000 and report.cores > 0 and report.fingerprint.torch
    assert msgspec.json.decode(msgspec.json.encode(report), type=HostReport) == report
    assert "there is no directory" in inspect_host(0, "127.0.0.1", 1, "./nowhere").model_error
    assert inspect_host(0, "127.0.0.1", 1, "demo").fingerprint.weights
