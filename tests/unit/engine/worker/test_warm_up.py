"""Warm-up steps on the engine's GPU path: they leave captured steps, and nothing that a request can see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serve_llm.engine.worker.graphs import BatchDescriptor, run_eagerly
from serve_llm.engine.worker.warm_up import compile_kernels, warm_up
from serve_llm.kernels import registry
from support.config import CONFIG
from support.engine import generate, greedy, make_engine
from support.gpu_path import graphs_of, make_gpu_engine
from support.tiny import make_checkpoint
from support.triton import NO_TRITON


@pytest.mark.parametrize(
    ("max_num_seqs", "captured"),
    [
        (20, {BatchDescriptor(16, 16, True), BatchDescriptor(8, 8), BatchDescriptor(1, 1)}),
        (1, {BatchDescriptor(16, 1, True), BatchDescriptor(1, 1)}),
    ],
)
def test_common_steps_are_captured_and_requests_go_on_as_before(
    max_num_seqs: int, captured: set[BatchDescriptor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, "llama")
    options = {"block_size": 8, "max_num_seqs": max_num_seqs}
    requests = [greedy(number, [number + 1, 2, 3], 6, logprobs=1) for number in range(3)]
    expected = generate(make_engine(tmp_path, **options), requests)
    engine = make_gpu_engine(tmp_path, monkeypatch, **options)
    worker = engine._executor._worker  # type: ignore[attr-defined]
    warm_up(worker._runner, worker._config, worker._kv_cache_config)
    assert set(graphs_of(engine)._graphs) == captured
    found = generate(engine, requests)
    assert {number: result.token_ids for number, result in found.items()} == {
        number: result.token_ids for number, result in expected.items()
    }


def test_sizes_for_which_kernels_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a cache of one block, whose runner captures nothing. The engine does not notice."""
    pytest.importorskip("triton", reason=NO_TRITON)
    make_checkpoint(tmp_path, "mixtral")
    options = {"block_size": 8, "max_num_seqs": 20}
    requests = [greedy(number, [number + 1, 2, 3], 6, logprobs=1) for number in range(3)]
    expected = generate(make_engine(tmp_path, **options), requests)
    engine = make_gpu_engine(tmp_path, monkeypatch, **options)
    worker = engine._executor._worker  # type: ignore[attr-defined]
    one_block = replace(worker._kv_cache_config, num_blocks=1)
    runner = worker._build_runner(one_block, run_eagerly)
    compile_kernels(runner, worker._config, one_block, 2)
    decodes = {BatchDescriptor(count, count) for count in (1, 2, 4, 8, 16)}
    assert set(runner.graphs._buffers) == decodes | {
        BatchDescriptor(count, 16, True) for count in (16, 32, 64, 128, 256, 512)
    }
    assert not graphs_of(engine)._buffers
    found = generate(engine, requests)
    assert {number: result.token_ids for number, result in found.items()} == {
        number: result.token_ids for number, result in expected.items()
    }


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3", "gemma3_text"])
def test_meaningless_results_raise_nothing(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses GPU kernels, none of which is launched."""
    pytest.importorskip("triton", reason=NO_TRITON)
    from triton.runtime.interpreter import InterpretedFunction

    make_checkpoint(tmp_path, family)
    kernels = registry.with_triton(batch_invariant=False)
    assert isinstance(kernels, registry.Kernels)
    engine = make_gpu_engine(tmp_path, monkeypatch, kernels, block_size=8, max_num_seqs=20)
    worker = engine._executor._worker  # type: ignore[attr-defined]
    worker._decoder.capturable = True  # as on a GPU
    launched: list[object] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *_, **__: launched.append(kernel))
    one_block = replace(worker._kv_cache_config, num_blocks=1)
    compile_kernels(worker._build_runner(one_block, run_eagerly), worker._config, one_block, 2)
    assert len(set(launched)) > 5


def test_models_without_text_and_tiny_contexts_have_none() -> None:
    for config in (replace(CONFIG, generates=False), replace(CONFIG, max_model_len=4)):
        warm_up(None, config, None)  # type: ignore[arg-type]
