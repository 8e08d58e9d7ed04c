"""Log lines while a rank loads its weights, and what the ranks then agree on."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from serve_llm.common import progress
from serve_llm.common.hub import read_config, resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.weights import load
from serve_llm.engine.worker import model_runner
from serve_llm.engine.worker.worker import Worker
from support.gpu_path import KERNELS, Recorder
from support.ranks import Ranks
from support.resolved import resolve_all
from support.tiny import make_checkpoint


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


def test_a_rank_that_records_steps_waits_for_all_ranks_too(tmp_path: Path) -> None:
    """Engines that share experts wait for each other's weights there."""
    make_checkpoint(tmp_path, "llama", head_dim=16)
    options = make_options(str(tmp_path), device="cpu", kv_cache_memory="1MiB", load_format="dummy")
    config, spec, weights = resolve_all(options, str(tmp_path), read_config(tmp_path))
    waits: list[bool] = []
    groups = ProcessGroups(wait_for_all=lambda own: bool(waits.append(own)))
    worker = Worker(config, spec, weights, Ranks(spec, ParallelLayout(1, 1)).shards[0], groups)
    worker.allocate(worker.num_blocks)
    assert waits == [True] and worker._runner.graphs is not None


@pytest.mark.parametrize("others_can", [True, False])
def test_a_rank_captures_steps_only_if_all_ranks_can(
    others_can: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise it would make other collective calls than the rest: more trial steps, and padded steps."""
    make_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(load, "choose", lambda *_, **__: KERNELS)
    monkeypatch.setattr(model_runner, "CudaCapture", Recorder)
    options = make_options(str(tmp_path), device="cpu", kv_cache_memory="1MiB", load_format="dummy")
    config, spec, weights = resolve_all(options, str(tmp_path), read_config(tmp_path))
    config = replace(config, enforce_eager=False)
    groups = ProcessGroups(wait_for_all=lambda own: own and others_can)
    worker = Worker(config, spec, weights, Ranks(spec, ParallelLayout(1, 1)).shards[0], groups)
    worker.allocate(worker.num_blocks)
    assert (worker._runner.graphs is not None) == others_can
    assert ("Steps are not captured as graphs" in caplog.text) == (not others_can)
