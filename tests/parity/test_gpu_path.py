"""The GPU path of an engine, without a GPU: steps start before the ids of the last one are known, decode steps are
captured and replayed, and there are padding rows. Mixed loads give the same tokens and logprobs as the plain engine on
a CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace as swap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch import Tensor

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.kernels import cache_fp8, registry
from support.engine import generate, greedy, make_engine
from support.gpu_path import KERNELS, assert_same, graphs_of, make_gpu_engine
from support.matrix import mostly_slow
from support.tiny import make_checkpoint
from support.triton import NO_TRITON


def load(vocab_size: int, count: int = 24) -> tuple[list[EngineCoreRequest], list[int]]:
    """Return requests of every kind, and the steps before which they arrive."""
    rng = random.Random(3)
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 7, "logprobs": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.0, "stop_token_ids": tuple(range(0, vocab_size, 5)), "min_tokens": 3},
        {"temperature": 0.7, "bad_words_ids": ((1,), (2, 3)), "logit_bias": {4: 2.0}},
        {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0},
    ]
    requests = []
    for number in range(count):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.choice((1, 3, 9, 17, 40)))]
        sampling = Sampling(**({"max_tokens": rng.choice((1, 2, 12, 30)), "seed": number} | kinds[number % len(kinds)]))
        requests.append(EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling))
    return requests, [rng.randrange(30) for _ in range(count)]


OPTIONS = {"block_size": 8, "max_num_seqs": 20, "max_num_batched_tokens": 37}


@pytest.mark.parametrize(
    "family",
    mostly_slow(
        ["llama", "mistral", "gpt2", "mixtral", "deepseek_v2", "deepseek_v3", "llama4_text"],
        ["llama", "mixtral", "deepseek_v3"],
    ),
)
def test_same_tokens_as_the_plain_engine(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = make_checkpoint(tmp_path, family)
    requests, arrivals = load(vocab_size)
    expected = generate(make_engine(tmp_path, **OPTIONS), requests, arrivals)
    engine = make_gpu_engine(tmp_path, monkeypatch, **OPTIONS)
    assert_same(generate(engine, requests, arrivals), expected)
    graphs = graphs_of(engine)
    assert len(graphs._capture.sizes) == len(graphs._graphs), "each size that was met again, once"
    is_mixed = [buffers.rows is not None for buffers in graphs._buffers.values()]
    assert any(is_mixed) and not all(is_mixed), "steps of both kinds were captured"


@pytest.mark.parametrize("family", mostly_slow(["llama", "deepseek_v3"], ["llama"]))
def test_a_cache_in_fp8(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fp8 cache gives the same tokens as a cache in the model's dtype whose keys and values were rounded to fp8, in
    at most half the bytes."""
    vocab_size = make_checkpoint(tmp_path, family)
    requests, arrivals = load(vocab_size, 10)
    rounded = swap(
        KERNELS,
        rope_and_cache=partial(write_rounded, KERNELS.rope_and_cache),
        rope_and_latent=partial(write_rounded, KERNELS.rope_and_latent),
    )
    whole = make_gpu_engine(tmp_path, monkeypatch, rounded, **OPTIONS)
    expected = generate(whole, requests, arrivals)
    engine = make_gpu_engine(tmp_path, monkeypatch, **OPTIONS, kv_cache_dtype="fp8")
    assert_same(generate(engine, requests, arrivals), expected)
    small, large = (each._executor.kv_cache_config.block_bytes for each in (engine, whole))  # type: ignore[attr-defined]
    assert large == 4 * small  # float32


def write_rounded(write: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Round the contents of the cache after each write; rounding twice changes nothing."""
    result = write(*arguments)
    cache = arguments[-2]
    cache.copy_(cache_fp8.quantise(cache))
    return result


def test_with_preemption_without_graphs_and_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = make_checkpoint(tmp_path, "llama")
    requests, arrivals = load(vocab_size)
    expected = generate(make_engine(tmp_path, **OPTIONS), requests, arrivals)
    small = {"max_model_len": 80, "kv_cache_memory": 14 * block_bytes(tmp_path)}
    engine = make_gpu_engine(tmp_path, monkeypatch, **OPTIONS, **small)
    assert_same(generate(engine, requests), expected)
    assert engine.scheduler.stats().num_preemptions > 0
    assert_same(
        generate(make_gpu_engine(tmp_path, monkeypatch, enforce_eager=True, **OPTIONS), requests, arrivals), expected
    )
    assert_same(generate(make_gpu_engine(tmp_path, monkeypatch, tensor=2, **OPTIONS), requests, arrivals), expected)


def test_stages_have_graphs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = make_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    requests, arrivals = load(vocab_size)
    expected = generate(make_engine(tmp_path, **OPTIONS), requests, arrivals)
    captures: list[list[int]] = []
    engine = make_gpu_engine(tmp_path, monkeypatch, tensor=2, stages=3, **OPTIONS)
    for worker in engine._executor.workers:  # type: ignore[attr-defined]
        graphs = worker._runner.graphs
        captures.append(graphs._capture.sizes)
    assert_same(generate(engine, requests, arrivals), expected)
    assert len(captures) == 6 and all(len(sizes) >= 3 for sizes in captures)


def test_greedy_requests_on_three_ranks_exchange_no_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab_size = make_checkpoint(tmp_path, "llama")
    requests = [greedy(number, [(7 * number + step) % vocab_size for step in range(5)], 9) for number in range(5)]
    expected = generate(make_engine(tmp_path, **OPTIONS), requests)
    engine = make_gpu_engine(tmp_path, monkeypatch, tensor=3, **OPTIONS)
    tried = len(engine._executor.ranks.meetings[0].calls)  # type: ignore[attr-defined]
    assert_same(generate(engine, requests), expected)
    calls = engine._executor.ranks.meetings[0].calls[tried:]  # type: ignore[attr-defined]
    gathered = {call for call in calls if call.startswith("all_gather")}
    assert gathered and all(call.startswith("all_gather [2, ") for call in gathered), gathered


def block_bytes(directory: Path) -> int:
    return make_engine(directory, **OPTIONS).kv_cache_config.block_bytes


def test_a_request_that_ends_while_its_next_step_is_computed_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_size = make_checkpoint(tmp_path, "llama")
    engine = make_gpu_engine(tmp_path, monkeypatch, **OPTIONS)
    prompt = list(range(9))
    first = generate(engine, [greedy(0, prompt, 6)])[0].token_ids
    stopped = greedy(1, prompt, 6, stop_token_ids=(first[2],))
    found = generate(engine, [stopped, greedy(2, prompt, 6), greedy(3, [vocab_size - 1], 6)], [0, 0, 3])
    assert found[1].token_ids == first[:3] and found[2].token_ids == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes"),
    [("qwen3", {"num_hidden_layers": 2, "layer_types": None}), ("deepseek_v3", {"num_hidden_layers": 2})],
)
def test_with_tritons_kernels_in_its_interpreter(
    family: str, sizes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    kernels = registry.with_triton(batch_invariant=True)
    assert isinstance(kernels, registry.Kernels), kernels
    vocab_size = make_checkpoint(tmp_path, family, **sizes)
    requests = load(vocab_size, count=5)[0]
    requests = [replace(request, sampling=replace(request.sampling, max_tokens=5)) for request in requests]
    expected = generate(make_engine(tmp_path, **OPTIONS), requests)
    engine = make_gpu_engine(tmp_path, monkeypatch, kernels, **OPTIONS)
    assert_same(generate(engine, requests), expected)
    assert graphs_of(engine)._capture.sizes
