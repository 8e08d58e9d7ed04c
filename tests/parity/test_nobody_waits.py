"""Steps on a GPU, with tensors that hold no numbers: the host never waits, and a captured step copies nothing from the
host and compiles nothing."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.worker import warm_up
from serve_llm.engine.worker.graphs import run_eagerly
from support.engine import generate
from support.matrix import mostly_slow
from support.tiny import FAMILIES, make_checkpoint
from support.triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)
from support.meta_path import META, NoNumbers, Watch, make_meta_engine

OPTIONS = {"block_size": 8, "max_num_seqs": 20, "max_num_batched_tokens": 37}
KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 7, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "stop_token_ids": (1, 2), "min_tokens": 3},
    {"temperature": 0.7, "bad_words_ids": ((1,), (2, 3)), "logit_bias": {4: 2.0}, "logprobs": 0},
    {"temperature": 0.5, "min_p": 0.1, "allowed_token_ids": (3, 4, 5)},
]


def load(vocab_size: int) -> tuple[list[EngineCoreRequest], list[int]]:
    rng = random.Random(5)
    requests = [
        EngineCoreRequest(
            id=number,
            prompt_ids=[rng.randrange(vocab_size) for _ in range(rng.choice((1, 9, 17, 40)))],
            sampling=Sampling(**({"max_tokens": 20, "seed": number} | KINDS[number % len(KINDS)])),
        )
        for number in range(21)
    ]
    return requests, [rng.randrange(20) for _ in requests]


def test_what_waits_is_seen() -> None:
    there, here = torch.zeros(4, device=META), torch.zeros(4)
    mask = torch.zeros(4, dtype=torch.bool, device=META)
    for waits in (
        there.tolist,
        there.cpu,
        mask.any().item,
        mask.nonzero,
        lambda: there[mask],
        lambda: there.masked_fill_(mask, 0.0)[mask.nonzero()],
        lambda: there.index_put_((mask,), there[:1]),
        lambda: torch.bincount(there.long()),
        lambda: there.repeat_interleave(there.long()),
        lambda: there.copy_(here),
        lambda: here.to(META),
        lambda: there[[0, 1]],
        lambda: torch.tensor([1, 2], device=META),
        lambda: torch.where(mask, torch.zeros(()), there),
    ):
        with pytest.raises((AssertionError, NotImplementedError, RuntimeError)), Watch(), NoNumbers():
            waits()


@pytest.mark.parametrize(
    "family",
    mostly_slow(["llama", "gemma2", "gpt2", "mixtral", "deepseek_v3", "gpt_oss"], ["llama", "mixtral", "deepseek_v3"]),
)
def test_no_step_waits_and_captured_ones_hold_what_they_need(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert family in FAMILIES
    requests, arrivals = load(make_checkpoint(tmp_path, family))
    engine, watch = make_meta_engine(tmp_path, monkeypatch, **OPTIONS)
    found = generate(engine, requests, arrivals)
    assert all(len(result.token_ids) >= 1 for result in found.values())
    assert len(watch.captured) >= 2 and watch.copies > 100 and len(watch.compiled) > 10


def test_nor_with_batch_invariant_kernels_or_without_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, arrivals = load(make_checkpoint(tmp_path, "llama"))
    for more in ({"batch_invariant": True}, {"enforce_eager": True}):
        with monkeypatch.context() as patch:
            engine, watch = make_meta_engine(tmp_path, patch, **OPTIONS, **more)
            generate(engine, requests, arrivals)
            assert bool(watch.captured) == ("batch_invariant" in more)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_first_requests_find_their_kernels_compiled(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_size = make_checkpoint(tmp_path, family, dtype="bfloat16", max_position_embeddings=8192)
    sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 4096}
    engine, watch = make_meta_engine(tmp_path, monkeypatch, **sizes)
    worker = engine._executor._worker  # type: ignore[attr-defined]
    without_waits = [
        step
        for step in warm_up.build_warm_up_steps(worker._kv_cache_config.groups, 64)
        if all(new.prompt_logprobs is None for new in step.new_requests)
    ]
    monkeypatch.setattr(warm_up, "build_warm_up_steps", lambda *sizes: without_waits)
    one_block = replace(worker._kv_cache_config, num_blocks=1)
    warm_up.compile_kernels(worker._build_runner(one_block, run_eagerly), worker._config, one_block, 2)
    compiled = len(watch.compiled)
    assert compiled > 20 and not watch.captured
    warm_up.warm_up(worker._runner, worker._config, worker._kv_cache_config)
    assert watch.compiled[compiled:] == [] and watch.captured
    for number, (length, kind) in enumerate(itertools.product((1, 11, 100, 1500), (*KINDS[:4], {"temperature": 1.0}))):
        ids = [(7 * number + place) % vocab_size for place in range(length)]
        sampling = Sampling(**({"max_tokens": 4, "seed": number} | kind))
        generate(engine, [EngineCoreRequest(id=number, prompt_ids=ids, sampling=sampling)])
        assert watch.compiled[compiled:] == [], (length, kind)
