"""GGUF files of architectures whose tensors the converter splits and joins are the models that transformers builds from
the same numbers, on any ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_llm.common.hub import resolve_model
from support.gguf_pieces import FAMILIES, make_gguf
from support.parity import check_greedy, check_logprobs, random_prompts


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    prompts = random_prompts(make_gguf(tmp_path, family))
    check_logprobs(resolve_model(str(tmp_path / "model.gguf")), tmp_path / "plain", prompts)


def test_qwen3_next_in_older_files(tmp_path: Path) -> None:
    """Older files store queries, keys, values and gates in one tensor."""
    prompts = random_prompts(make_gguf(tmp_path, "qwen3_next", kept="in_proj_qkvz.weight"))
    check_logprobs(resolve_model(str(tmp_path / "model.gguf")), tmp_path / "plain", prompts)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_neox", "granitemoe", "qwen3_5_text"])
def test_several_ranks(family: str, tmp_path: Path) -> None:
    prompts = random_prompts(make_gguf(tmp_path, family, "Q4_0"))
    directory = resolve_model(str(tmp_path / "model.gguf"))
    check_greedy(directory, tmp_path / "plain", prompts, ({}, {"tensor": 2}, {"tensor": 3}, {"pipeline": 2}))
