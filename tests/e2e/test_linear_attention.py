"""Streams of a model with linear attention continue when an engine dies, and are the same with one process per rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import httpx2
import pytest

from serve_llm.common.hub import resolve_model
from support.daemon import Daemon
from support.streams import Streams, mixed
from support.tiny import make_checkpoint

SMALL = ("--kv-cache-memory", "64MiB", "--max-restarts", "100", "--served-model-name", "demo", "--dtype", "float32")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model with the demo model's tokens."""
    path = tmp_path_factory.mktemp("hybrid")
    demo = resolve_model("demo")
    sizes = json.loads((demo / "config.json").read_text())
    make_checkpoint(path, "qwen3_next", vocab_size=sizes["vocab_size"], max_position_embeddings=2048, std=0.1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, path)
    return path


def converse(url: str, num_turns: int) -> tuple[list[str], list[int], list[int]]:
    """Return the answers of a conversation, and the numbers of tokens of each prompt: all, and those from the cache."""
    messages: list[dict[str, str]] = []
    answers, prompts, cached = [], [], []
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"{turn}. Write a function that adds {turn} numbers."})
        body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        reply = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
        answers.append(reply["choices"][0]["message"]["content"])
        prompts.append(reply["usage"]["prompt_tokens"])
        cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        messages.append({"role": "assistant", "content": "def add(*numbers): return sum(numbers)"})
    return answers, prompts, cached


def test_a_conversation_continues_from_states(directory: Path) -> None:
    with Daemon(str(directory), *SMALL, "--no-prefix-caching") as daemon:
        plain, _, none = converse(daemon.wait_until_serving(), 4)
    assert not any(none)
    with Daemon(str(directory), *SMALL) as daemon:
        answers, prompts, cached = converse(daemon.wait_until_serving(), 4)
        hits = daemon.metrics()["serve_llm_prefix_cache_hits_total"]
    assert answers == plain
    assert cached == [0, *((count - 1) // 16 * 16 for count in prompts[:-1])]
    assert hits == sum(cached)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [(), ("--speculative-config", "ngram")], ids=["plain", "drafts"])
def test_streams_survive_their_engine(drafts: tuple[str, ...], directory: Path) -> None:
    bodies = mixed(12)
    with Daemon(str(directory), *SMALL) as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), bodies).finish()
        daemon.wait_until_logged("Snapshots of states, one for each cached prefix")
    with Daemon(str(directory), *SMALL, "--data-parallel-size", "2", *drafts) as daemon:
        daemon.wait_until_serving()
        streams = Streams(daemon.url, bodies)
        streams.wait_for(120)
        os.kill(daemon.engine_pids()[0], signal.SIGKILL)
        daemon.wait_until_logged("it is replaced")
        assert streams.finish() == undisturbed


@pytest.mark.slow
def test_ranks_in_processes(directory: Path) -> None:
    body = {"prompt": "def area(width, height):", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    with Daemon(str(directory), *SMALL) as daemon:
        alone = Streams(daemon.wait_until_serving(), [body]).finish()
    with Daemon(str(directory), *SMALL, "-tp", "2", "-pp", "2") as daemon:
        assert Streams(daemon.wait_until_serving(), [body]).finish() == alone
