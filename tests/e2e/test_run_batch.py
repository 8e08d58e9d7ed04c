"""`serve-llm run-batch` as a command: complete results, and continued runs after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from support.daemon import SERVE_LLM, START_SECONDS


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [SERVE_LLM, "run-batch", "demo", "-i", "in.jsonl", "-o", "out.jsonl", *arguments]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)


def write_requests(folder: Path, count: int, max_tokens: int) -> None:
    body = {"prompt": "def main():\n", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body})
        for number in range(count)
    ]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")


def wait_for_growth(path: Path, process: subprocess.Popen[str], size: int) -> None:
    """Wait until the file is longer than `size`, or the process has ended."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and (not path.exists() or path.stat().st_size <= size):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill with -9 only the process that writes. Its children end by themselves."""
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    psutil.wait_procs(children, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "rounds"), [(300, 1), (10_000, 5)])
def test_killed_runs_lose_and_double_nothing(tmp_path: Path, count: int, rounds: int) -> None:
    write_requests(tmp_path, count, max_tokens=16)
    path = tmp_path / "out.jsonl"
    num_killed = 0
    for _ in range(rounds):
        size = path.stat().st_size if path.exists() else 0
        process = start(tmp_path, "--max-num-seqs", "8")
        wait_for_growth(path, process, size)
        num_killed += process.poll() is None
        kill(process)
    process = start(tmp_path)
    _, log = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 0, log
    assert num_killed == rounds
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(int(result["custom_id"]) for result in results) == list(range(count))
    assert {result["response"]["status_code"] for result in results} == {200}
    assert len({result["response"]["body"]["choices"][0]["text"] for result in results}) == 1


def test_an_invalid_file_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a"}\n')
    process = start(tmp_path)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "in.jsonl, line 1" in log
    assert not (tmp_path / "out.jsonl").exists()
