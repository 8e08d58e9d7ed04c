"""Blocks on disk: two engines fill one directory, one of them is killed, and a later start reuses the blocks."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from support.daemon import Daemon

# A cache for one prompt and a half, host memory for two.
SIZES = ("--max-model-len", "512", "--kv-cache-memory", "1600KiB", "--kv-offload-memory", "2MiB")
PROMPTS = [[(7 * number + place) % 900 + 20 for place in range(320)] for number in range(5)]
OPENED = re.compile("Blocks of KV cache are kept in")


def complete(daemon: Daemon, prompt: list[int]) -> dict[str, object]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        daemon.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, object] = json.loads(answer.read())
        return found


def texts(daemon: Daemon) -> list[str]:
    return [complete(daemon, prompt)["choices"][0]["text"] for prompt in PROMPTS]  # type: ignore[index]


def hits_on_disk(daemon: Daemon) -> float:
    with urllib.request.urlopen(daemon.url + "/metrics", timeout=10) as answer:
        found = re.findall(r'serve_llm_kv_offload_hits_total{.*tier="disk".*} (\S+)', answer.read().decode())
    return sum(map(float, found))


def wait_until_open(daemon: Daemon, num_engines: int) -> None:
    while sum(OPENED.search(line) is not None for line in daemon.log) < num_engines:
        assert daemon.process.poll() is None, daemon.log
        time.sleep(0.05)  # polling interval


@pytest.mark.slow
@pytest.mark.pairs("DP + KV offload")
def test_engines_share_a_directory(server: Daemon, tmp_path: Path) -> None:
    server.wait_until_serving()
    expected = texts(server)
    options = ("demo", *SIZES, "--kv-offload-dir", str(tmp_path))
    with Daemon(*options, "--data-parallel-size", "2") as two:
        two.wait_until_serving()
        wait_until_open(two, 2)
        assert texts(two) == expected and texts(two) == expected
        os.kill(two.engine_pids()[0], signal.SIGKILL)
        assert texts(two) == expected
        while len(list(tmp_path.glob("*/??/*"))) < 20:
            assert texts(two) == expected
    assert len({path.parent.parent for path in tmp_path.glob("*/??/*")}) == 1
    with Daemon(*options) as later:
        later.wait_until_serving()
        wait_until_open(later, 1)
        assert texts(later) == expected
        assert hits_on_disk(later) > 0
