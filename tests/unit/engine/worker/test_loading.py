"""What the log says while a rank loads its weights."""

import logging

import pytest

from serve_llm.common import progress
from serve_llm.common.hub import read_config, resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.worker.worker import Worker
from support.ranks import Ranks
from support.resolved import resolve_all


def test_the_share_that_is_loaded_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "TENTH_SECONDS", 0.0)
    directory = resolve_model("demo")
    options = make_options("demo", device="cpu", kv_cache_memory="1MiB", load_format="dummy")
    config, spec, weights = resolve_all(options, str(directory), read_config(directory))
    ranks = Ranks(spec, ParallelLayout(1, 1))
    with caplog.at_level(logging.INFO):
        Worker(config, spec, weights, ranks.shards[0], ranks.neighbours[0])
    lines = [line for line in caplog.messages if line.startswith("Loading weights: ")]
    assert len(lines) >= 5 and lines[-1] == "Loading weights: 100%"
