"""Steps at start on the engine's GPU path: they leave captured steps, and nothing that a request sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serve_llm.engine.worker.graphs import Size
from serve_llm.engine.worker.warm_up import warm_up
from support.config import CONFIG
from support.engine import generate, greedy, make_engine
from support.gpu_path import graphs_of, make_gpu_engine
from support.tiny import make_checkpoint


@pytest.mark.parametrize(
    ("max_num_seqs", "captured"),
    [
        (20, {Size(16, 16, True), Size(8, 8), Size(1, 1)}),
        (1, {Size(16, 1, True), Size(1, 1)}),
    ],
)
def test_common_steps_are_captured_and_requests_go_on_as_before(
    max_num_seqs: int, captured: set[Size], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    options = {"block_size": 8, "max_num_seqs": max_num_seqs}
    requests = [greedy(number, [number + 1, 2, 3], 6, logprobs=1) for number in range(3)]
    expected = generate(make_engine(tmp_path, **options), requests)
    engine = make_gpu_engine(tmp_path, monkeypatch, **options)
    worker = engine._executor._worker  # type: ignore[attr-defined]
    warm_up(worker._runner, worker._config, worker._layout)
    assert set(graphs_of(engine)._graphs) == captured
    found = generate(engine, requests)
    assert {number: result.token_ids for number, result in found.items()} == {
        number: result.token_ids for number, result in expected.items()
    }


def test_models_without_text_and_tiny_contexts_have_none() -> None:
    for config in (replace(CONFIG, generates=False), replace(CONFIG, max_model_len=4)):
        warm_up(None, config, None)  # type: ignore[arg-type]
