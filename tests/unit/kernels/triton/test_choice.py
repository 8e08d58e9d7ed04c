"""Choosing a GPU's kernels: Triton's if they can be imported, else one line that says so; and a whole model on them."""

from __future__ import annotations

import json
import logging
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve_llm.common.errors import OptionError
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.weights import load
from serve_llm.kernels import registry
from serve_llm.kernels.backends.backend import (
    AttentionBackend,
    AttentionForm,
    BackendRequirements,
    Offer,
    UnavailableBackend,
)
from support.forward import Harness, load_whole
from support.tiny import config_of, make_checkpoint
from support.triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)
from serve_llm.kernels.triton import activation, attention, fp8, linear, moe, norm, rope

GPU = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_has_tritons(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    kernels = registry.choose(GPU, dtype, {64, 576})
    assert kernels.rms_norm is norm.rms_norm and kernels.add_rms_norm is norm.add_rms_norm
    assert kernels.rope_and_latent is rope.rope_and_latent
    assert kernels.layer_norm is norm.layer_norm and kernels.rope_and_cache is rope.rope_and_cache
    assert kernels.paged_attention.func is attention.paged_attention  # type: ignore[attr-defined]
    assert kernels.pack is registry.PORTABLE.pack and kernels.capturable
    assert kernels.pack_fp8.keywords == {"quantise": fp8.quantise_rows}  # type: ignore[attr-defined]
    stored = kernels.pack_stored_fp8.keywords  # type: ignore[union-attr]
    assert stored["pack_grouped"] is kernels.pack_grouped
    assert (stored["quantise_rows"], stored["quantise_blocks"]) == (fp8.quantise_rows, fp8.quantise_blocks)
    assert kernels.activations.keys() == registry.PORTABLE.activations.keys()
    own = {name for name, kernel in kernels.activations.items() if kernel != registry.PORTABLE.activations[name]}
    assert own == set(activation.ACTIVATIONS) and "relu" not in own
    assert not caplog.records


def test_what_is_batch_invariant() -> None:
    kernels = registry.choose(GPU, torch.bfloat16, {64}, batch_invariant=True)
    assert kernels.pack is linear.pack and kernels.pack_heads is linear.pack_heads
    assert kernels.pack_stored_fp8 is None
    assert kernels.paged_attention.keywords == {"batch_invariant": True}  # type: ignore[attr-defined]
    assert kernels.pack_experts.func is moe.pack_experts  # type: ignore[attr-defined]
    assert kernels.pack_experts.keywords == {"batch_invariant": True}  # type: ignore[attr-defined]


def test_attention_of_another_backend(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked: list[BackendRequirements] = []
    answers: dict[str, Offer] = {}

    def offer(features: BackendRequirements) -> Offer:
        asked.append(features)
        return answers["flash"]

    def choose(attention_backend: str = "auto") -> registry.Kernels:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            return registry.choose(GPU, torch.bfloat16, {64}, attention_backend=attention_backend)

    monkeypatch.setattr(registry, "ATTENTION_BACKENDS", (AttentionBackend("Flash", "flash", offer),))
    answers["flash"] = "it is too old"
    chosen = choose()
    assert chosen.paged_attention.func is attention.paged_attention  # type: ignore[attr-defined]
    assert caplog.messages == ["GPU kernels: Triton; attention: Triton; not Flash: it is too old"]
    with pytest.raises(UnavailableBackend, match=r"^Flash: it is too old$"):
        choose("flash")
    assert asked == [BackendRequirements(GPU, torch.bfloat16, None, {AttentionForm(64)})] * 2
    choose("triton")
    assert caplog.messages == ["GPU kernels: Triton; attention: Triton"] and len(asked) == 2
    answers["flash"] = {"paged_attention": print}
    for attention_backend in ("auto", "flash"):
        chosen = choose(attention_backend)
        assert chosen.paged_attention is print and chosen.rms_norm is norm.rms_norm and chosen.capturable
        assert caplog.messages == ["GPU kernels: Triton; attention: Flash"]


@pytest.mark.parametrize(
    ("family", "forms"),
    [
        ("gpt_oss", {AttentionForm(8, has_window=True, has_sinks=True), AttentionForm(8, has_sinks=True)}),
        ("gemma2", {AttentionForm(8, has_window=True, has_softcap=True), AttentionForm(8, has_softcap=True)}),
        ("mpt", {AttentionForm(8, has_alibi=True)}),
        ("deepseek_v3", {AttentionForm(576, 512)}),
    ],
)
def test_backends_are_told_what_a_model_needs(
    family: str, forms: set[AttentionForm], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offer(features: BackendRequirements) -> Offer:
        kinds = {replace(form, head_dim=8, value_dim=form.value_dim and 4) for form in features.attention_forms}
        assert kinds == {replace(form, head_dim=8, value_dim=form.value_dim and 4) for form in forms}
        return "it was told"

    monkeypatch.setattr(registry, "ATTENTION_BACKENDS", (AttentionBackend("Flash", "flash", offer),))
    spec, _ = read_model(config_of(family))
    with pytest.raises(OptionError, match=r"^--attention-backend flash: Flash: it was told; use auto, or omit it$"):
        load.choose_kernels(spec, torch.bfloat16, GPU, attention_backend="flash")


def test_without_triton_plain_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in [name for name in sys.modules if name.startswith("serve_llm.kernels.triton.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with caplog.at_level(logging.WARNING):
        chosen = registry.choose(GPU, torch.bfloat16, {64})
    portable = registry.PORTABLE
    assert replace(chosen, pack=portable.pack, pack_heads=portable.pack_heads) == portable
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "plain torch operations, which is much slower: Triton's kernels cannot be imported" in caplog.text
    with pytest.raises(UnavailableBackend, match=r"^Triton.s kernels cannot be imported"):
        registry.choose(GPU, torch.bfloat16, {64}, attention_backend="triton")


def test_other_devices_have_neither(caplog: pytest.LogCaptureFixture) -> None:
    assert registry.choose(torch.device("meta"), torch.bfloat16, {64}) is registry.PORTABLE
    assert not caplog.records


@pytest.mark.slow
# With batch_invariant, Triton also computes linear layers; on a CPU, experts can only use these.
@pytest.mark.parametrize(
    ("family", "batch_invariant"),
    [
        ("qwen3", False),
        ("gpt2", False),
        ("opt", False),
        ("nemotron", False),
        ("deepseek_v3", False),
        ("qwen2_moe", True),
    ],
)
def test_a_model_on_the_kernels_for_rows(
    family: str, batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted on a CPU, with the portable attention; prompts run in chunks, so that rows are in batches of all
    kinds."""
    rng = random.Random(3)
    vocab_size = make_checkpoint(tmp_path, family, std=0.1)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 12)]
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))

    def logprobs(kernels: registry.Kernels) -> torch.Tensor:
        monkeypatch.setattr(load, "choose", lambda *args, **more: kernels)
        decoder = load_whole(tmp_path, spec, weight_map)
        return torch.cat(Harness(spec, decoder, torch.float32).logprobs(prompts, max_chunk=7))

    interpreted = registry.with_triton(batch_invariant)
    assert isinstance(interpreted, registry.Kernels)
    ours = logprobs(replace(interpreted, paged_attention=registry.PORTABLE.paged_attention))
    assert (ours - logprobs(registry.PORTABLE)).abs().max() < 2e-4
