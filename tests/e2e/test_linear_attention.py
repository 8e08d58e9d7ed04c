"""Streams of a model with linear attention continue when an engine dies, and are the same with one process per rank."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

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


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [(), ("--speculative-config", "ngram")], ids=["plain", "drafts"])
def test_streams_survive_their_engine(drafts: tuple[str, ...], directory: Path) -> None:
    bodies = mixed(12)
    with Daemon(str(directory), *SMALL) as daemon:
        undisturbed = Streams(daemon.wait_until_serving(), bodies).finish()
        daemon.wait_until_logged("Prefix caching is off: linear attention")
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
