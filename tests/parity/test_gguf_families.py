"""GGUF files of architectures whose tensors the converter cuts and joins are the models that transformers makes of the
same numbers, on any ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from serve_llm.common.hub import resolve_model
from support.engine import generate, greedy, make_engine
from support.forward import Harness, load
from support.gguf_pieces import FAMILIES, make_gguf
from support.reference import reference_logprobs


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 17, 60)]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    prompts = random_prompts(make_gguf(tmp_path, family))
    spec, decoder = load(resolve_model(str(tmp_path / "model.gguf")))
    for prompt, ours in zip(prompts, Harness(spec, decoder, torch.float32).logprobs(prompts), strict=True):
        assert (ours - reference_logprobs(tmp_path / "plain", prompt)).abs().max() < 5e-4


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_neox", "granitemoe"])
def test_several_ranks(family: str, tmp_path: Path) -> None:
    prompts = random_prompts(make_gguf(tmp_path, family, "Q4_0"))
    wanted = [greedy(number, prompt, 6) for number, prompt in enumerate(prompts)]
    expected = generate(make_engine(tmp_path / "plain", dtype="float32"), wanted)
    directory = resolve_model(str(tmp_path / "model.gguf"))
    for grid in ({}, {"tensor": 2}, {"tensor": 3}, {"pipeline": 2}):
        found = generate(make_engine(directory, dtype="float32", **grid), wanted)
        assert [found[n].token_ids for n in found] == [expected[n].token_ids for n in expected]
