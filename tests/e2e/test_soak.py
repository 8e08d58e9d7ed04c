"""Rounds of 64 streams, a random half of which is cut at a random moment: no resources are leaked, and nothing
grows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from support.daemon import Daemon

STREAMS = 64


async def one_stream(url: str, rng: random.Random) -> None:
    """Send a request; read it to its end, or disconnect after some bytes (possibly before the first)."""
    host, port = url.removeprefix("http://").split(":")
    stay = rng.random() < 0.5
    body = json.dumps(
        {
            "model": "demo",
            "prompt": [rng.randrange(300, 4000) for _ in range(rng.randrange(1, 100))],
            "max_tokens": rng.randrange(1, 60),
            "stream": rng.random() < 0.8,
            "n": rng.choice([1, 1, 2]),
            "temperature": 1.0,
        }
    ).encode()
    leave_after = rng.choice([0, 0, 1, 400, 3000])
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    received = b""
    while stay or len(received) < leave_after:
        data = await reader.read(65536)
        received += data
        if not data:
            break
    if stay:
        assert b" 200 OK" in received.split(b"\r\n")[0]
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def one_round(url: str, rng: random.Random) -> None:
    await asyncio.gather(*(one_stream(url, random.Random(rng.random())) for _ in range(STREAMS)))


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def idle(daemon: Daemon) -> bool:
    metrics = daemon.metrics()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(metrics[f"serve_llm_{name}"] == 0 for name in names)


def held(daemon: Daemon) -> tuple[int, int]:
    """Return (resident bytes, open descriptors) of the daemon and its engine."""
    processes = [psutil.Process(daemon.process.pid), psutil.Process(daemon.engine_pid())]
    return sum(p.memory_info().rss for p in processes), sum(p.num_fds() for p in processes)


async def soak(daemon: Daemon, rounds: int, settled: int) -> None:
    """Compare the minimum held over `settled` rounds early and late.

    The C library returns freed pages late, so a single reading of resident memory may be 4 % above the next one, in
    either direction. Leaks never go away, so they raise the minimum of several readings too.
    """
    rng = random.Random(5)
    readings: list[tuple[int, int]] = []
    for _ in range(rounds):
        await one_round(daemon.url, rng)
        await until(lambda: idle(daemon))
        readings.append(held(daemon))
    early = readings[settled - 1 : 2 * settled - 1]
    late = readings[-settled:]
    for kind, name in enumerate(("resident bytes", "open descriptors")):
        before = min(reading[kind] for reading in early)
        after = min(reading[kind] for reading in late)
        assert after <= 1.03 * before, f"{name} grew from {before:,} to {after:,}"


@pytest.mark.slow
def test_rounds_of_streams_leave_nothing_behind() -> None:
    with Daemon("demo") as daemon:
        daemon.wait_until_serving()
        asyncio.run(soak(daemon, rounds=24, settled=5))
        assert not [line for line in daemon.log if line.startswith(("WARNING", "ERROR")) or "Traceback" in line]


@pytest.mark.slow
def test_every_child_ends_with_the_daemon_however_it_ends() -> None:
    with Daemon("demo") as daemon:
        daemon.wait_until_serving()
        large = json.dumps({"prompt": "word " * 3000}).encode()  # a separate process reads it
        urllib.request.urlopen(daemon.url + "/tokenize", large, timeout=30).close()
        children = psutil.Process(daemon.process.pid).children(recursive=True)
        assert len(children) >= 2
        (directory,) = {Path(word[6:]).parent for child in children for word in child.cmdline() if word[:6] == "ipc://"}
        assert directory.is_dir()
        daemon.process.kill()
        for child in children:
            child.wait(10)
            assert not Path(f"/proc/{child.pid}").exists()
        assert not directory.exists()
