"""Many more requests than the daemon can handle, from one key: they are refused, and another key is not harmed."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.daemon import Daemon

OPTIONS = ("--max-num-seqs", "4", "--max-queue", "16", "--api-key", "heavy", "--api-key", "light")


def complete(url: str, key: str, number: int, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str]]:
    """Request 60 tokens. Returns (status, headers)."""
    body = json.dumps({"prompt": [300 + number % 3000] * 40, "max_tokens": 60, "ignore_eos": True}).encode()
    request = urllib.request.Request(
        url + "/v1/completions", body, {"Authorization": f"Bearer {key}"} | (headers or {})
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, dict(answer.headers)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, dict(refused.headers)


@pytest.mark.slow
def test_one_key_that_floods_the_queue_is_refused_and_another_is_served() -> None:
    with Daemon("demo", *OPTIONS) as daemon, ThreadPoolExecutor(48) as clients:
        url = daemon.wait_until_serving()
        heavy = [clients.submit(complete, url, "heavy", number) for number in range(300)]
        light = [complete(url, "light", number) for number in range(12)]
        refused = [headers for status, headers in (future.result() for future in heavy) if status == 503]
        assert [status for status, _ in light] == [200] * 12
        assert refused and len(refused) < 300, "some are served, some are not"
        assert all(int(headers["retry-after"]) >= 1 for headers in refused)
        late, _ = complete(url, "light", 0, {"X-Request-Timeout": "0.000001"})
        assert late == 504
        request = urllib.request.Request(url + "/status", headers={"Authorization": "Bearer light"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            status = json.load(answer)
        assert status["queue"]["num_open"] == status["queue"]["waiting_requests"] == 0
        assert status["queue"]["refused"]["queue_full"] >= len(refused)
