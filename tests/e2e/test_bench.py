"""serve-llm bench with the demo model: a running server, one of its own, and the engine without HTTP."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from support.daemon import SERVE_LLM, Daemon


def bench(*arguments: str) -> str:
    done = subprocess.run([SERVE_LLM, "bench", *arguments], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_serve_with_a_running_server(server: Daemon, tmp_path: Path) -> None:
    lengths = ("--random-input-len", "24", "--random-output-len", "6", "--seed", "3")
    saved = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json")
    table = bench("serve", server.url, "--num-prompts", "5", "--request-rate", "50", *lengths, *saved)
    assert "Successful requests:                   5\n" in table and "Median TTFT (ms):" in table
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (5 * 24, 5 * 6)
    assert result["mean_e2el_ms"] >= result["mean_ttft_ms"] > 0 and result["duration"] > 0
    conversations = tmp_path / "chats.jsonl"
    turns = [{"from": "human", "value": "Hello!"}, {"from": "gpt", "value": "Hello there, how are you?"}]
    conversations.write_text(json.dumps({"conversations": turns}))
    data = ("--dataset-name", "sharegpt", "--dataset-path", str(conversations))
    table = bench("serve", server.url, "--num-prompts", "2", "--backend", "openai-chat", *data)
    assert "Successful requests:                   2\n" in table


@pytest.mark.slow
def test_serve_with_a_server_of_its_own() -> None:
    prefixes = ("--prefix-repetition-prefix-len", "32", "--prefix-repetition-suffix-len", "4")
    more = ("--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "4", "--max-num-seqs", "4")
    table = bench("serve", "demo", "--num-prompts", "4", "--dataset-name", "prefix-repetition", *prefixes, *more)
    assert f"Total input tokens:                    {4 * 36}\n" in table
    assert "Total generated tokens:                16\n" in table


@pytest.mark.slow
def test_offline(tmp_path: Path) -> None:
    lengths = ("--input-len", "16", "--output-len", "4", "--max-model-len", "64")
    iterations = ("--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1")
    written = ("--output-json", str(tmp_path / "l.json"), "--plot", str(tmp_path / "l.svg"))
    table = bench("latency", "demo", *lengths, *iterations, *written)
    assert "Batches in order" in (tmp_path / "l.svg").read_text()
    assert "Batches:                               2\n" in table
    result = json.loads((tmp_path / "l.json").read_text())
    assert len(result["latencies"]) == 2 and 0 < result["median_batch_ms"] <= result["p99_batch_ms"]
    table = bench("throughput", "demo", "--num-prompts", "6", *lengths, "--plot", str(tmp_path / "t.svg"))
    assert "Answered requests" in (tmp_path / "t.svg").read_text()
    assert (
        "Total generated tokens:                24\n" in table
        and "Total input tokens:                    96\n" in table
    )


@pytest.mark.slow
def test_offline_datasets(tmp_path: Path) -> None:
    prefixes = ("--prefix-repetition-prefix-len", "32", "--prefix-repetition-suffix-len", "4")
    more = ("--prefix-repetition-num-prefixes", "2", "--prefix-repetition-output-len", "3")
    table = bench("throughput", "demo", "--num-prompts", "4", "--dataset-name", "prefix_repetition", *prefixes, *more)
    assert f"Total input tokens:                    {4 * 36}\n" in table
    assert "Total generated tokens:                12\n" in table
    conversations = tmp_path / "chats.jsonl"
    turns = [{"from": "human", "value": "Hello!"}, {"from": "gpt", "value": "Hello there, how are you?"}]
    conversations.write_text(json.dumps({"conversations": turns}))
    data = ("--dataset-name", "sharegpt", "--dataset-path", str(conversations))
    table = bench("throughput", "demo", "--num-prompts", "2", *data, "--output-len", "5")
    assert "Total generated tokens:                10\n" in table


@pytest.mark.slow
def test_start(tmp_path: Path) -> None:
    written = ("--output-json", str(tmp_path / "s.json"), "--plot", str(tmp_path / "s.svg"))
    table = bench("start", "demo", "--num-iters", "1", "--max-num-seqs", "2", *written)
    assert "Starts of demo" in (tmp_path / "s.svg").read_text()
    assert "First token after, median (ms):" in table
    result = json.loads((tmp_path / "s.json").read_text())
    assert result["first_token_ms"][0] > result["serving_ms"][0] > 0
