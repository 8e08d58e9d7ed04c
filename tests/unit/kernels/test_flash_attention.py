"""FlashAttention-3 as a backend: its arguments, and when it is offered. A stand-in has its signatures."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from reference import attention as definition
from serve_llm.kernels import attention
from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.backends import flash_attention
from serve_llm.kernels.backends.backend import AttentionForm, BackendRequirements
from serve_llm.kernels.backends.flash_attention import FlashAttention
from support.flash_library import FlashLibrary
from support.paged import make_sequence, run

CPU = torch.device("cpu")
H100 = BackendRequirements(CPU, torch.bfloat16, (9, 0), {AttentionForm(128), AttentionForm(64, has_window=True)})
LATENT = AttentionForm(576, 512)


class Flash:
    """Has the functions of `kernels.attention`. Replaces the NaN of released blocks by numbers, as on a GPU."""

    def __init__(self) -> None:
        self.library = FlashLibrary()
        self._attend = FlashAttention(self.library)

    def write_cache(self, key: Tensor, value: Tensor | None, cache: Tensor, slots: Tensor) -> None:
        cache.nan_to_num_(5.0)
        attention.write_cache(key, value, cache, slots)

    def paged_attention(
        self, query: Tensor, cache: Tensor, table: Tensor, starts: Sequence[int], contexts: Sequence[int], **how: Any
    ) -> Tensor:
        lengths = Lengths(*(torch.tensor(numbers, dtype=torch.int32) for numbers in (starts, contexts)))
        found = self._attend(query, cache, table, starts, contexts, on_device=lengths, **how)
        again = self._attend(query, cache, table, starts, contexts, on_device=lengths, **how)
        assert torch.equal(found, again) and len(lengths.plans) == 1, "the plan is made once for all layers"
        return found


@pytest.mark.parametrize(
    ("shape", "window", "how"),
    [
        ((4, 2, 64, 16), None, {}),
        ((8, 1, 128, 16), 37, {}),
        ((4, 2, 256, 32), 20, {"softcap": 5.0}),
        ((8, 2, 64, 16), 16, {"sinks": torch.arange(8) / 4.0}),
        ((16, 1, 576, 16), None, {"value_dim": 512}),
    ],
)
@pytest.mark.parametrize("chunk", [None, 9])
def test_it_computes_what_the_definition_says(
    shape: tuple[int, int, int, int], window: int | None, how: dict[str, Any], chunk: int | None
) -> None:
    sequences = [make_sequence(length, shape, torch.bfloat16, seed) for seed, length in enumerate((1, 40, 17))]
    found = run(sequences, shape, window, random.Random(3), chunk, kernels=Flash(), **how)
    exact = run(sequences, shape, window, random.Random(3), None, kernels=definition, **how)
    for one, other in zip(found, exact, strict=True):
        assert (one.float() - other.float()).abs().max() <= 0.02 * other.float().abs().max()


def test_a_captured_step_may_hold_less_than_its_bounds() -> None:
    """With the bounds of a captured step: one prompt may have all tokens, and the rest is padding with a context of
    0."""
    query, cache = torch.randn(6, 4, 64).bfloat16(), torch.randn(4, 2, 2, 16, 64).bfloat16()
    table = torch.tensor([[1, 2], [0, 0], [0, 0]], dtype=torch.int32)
    lengths = Lengths(*(torch.tensor(n, dtype=torch.int32) for n in ([0, 5, 5, 6], [20, 0, 0])))
    found = FlashAttention(FlashLibrary())(query, cache, table, [0, 1, 6, 6], [32] * 3, scale=0.1, on_device=lengths)
    exact = definition.paged_attention(query[:5], cache, table[:1], [0, 5], [20], scale=0.1)
    assert (found[:5].float() - exact.float()).abs().max() < 0.02 and not found[5].any()
    with pytest.raises(AssertionError):  # the stand-in checks the claim that all are decodes
        FlashAttention(FlashLibrary())(query, cache, table, [0, 1, 2, 3], [32] * 3, scale=0.1, on_device=lengths)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FlashLibrary:
    """Put the library where `kernels` finds it in the Hub's cache."""
    found = FlashLibrary()

    def get_kernel(
        repo_id: str, *, revision: str | None = None, version: int | None = None, trust_remote_code: bool = False
    ) -> FlashLibrary:
        assert (repo_id, revision, trust_remote_code) == ("kernels-community/vllm-flash-attn3", "v1", False)
        return found

    monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=get_kernel))
    return found


def test_it_is_offered_after_a_trial_of_what_the_model_needs(
    library: FlashLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    forms = {
        AttentionForm(64, has_window=True, has_sinks=True),
        AttentionForm(256, has_softcap=True),
        LATENT,
    }
    for dtype in (torch.bfloat16, torch.float16):
        offered = flash_attention.offer(replace(H100, attention_forms=forms, dtype=dtype))
        assert isinstance(offered, dict) and isinstance(offered["paged_attention"], FlashAttention), offered
    assert library.plans == 6
    assert caplog.messages == ["FlashAttention-3: commit unknown of kernels-community/vllm-flash-attn3 (v1)"] * 2


def test_the_log_names_the_commit(library: FlashLibrary, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    commit = "0123456789abcdef0123456789abcdef01234567"
    cache = "/cache/kernels--kernels-community--vllm-flash-attn3/snapshots"
    library.__file__ = f"{cache}/{commit}/build/torch-stable-abi29-cu130-x86_64-linux/__init__.py"  # type: ignore[attr-defined]
    assert isinstance(flash_attention.offer(H100), dict)
    assert f"commit {commit} of" in caplog.text


@pytest.mark.parametrize(
    ("requirements", "reason"),
    [
        (replace(H100, batch_invariant=True), "which --batch-invariant rules out"),
        (replace(H100, capability=(8, 9)), r"compute capability 9.0 \(H100, H200\); found: 8.9"),
        (replace(H100, capability=None), "found: no GPU"),
        (replace(H100, cache_dtype=torch.float8_e4m3fn), "round queries to 8 bits as well to read a KV cache in fp8"),
        (replace(H100, dtype=torch.float32), "computes bfloat16 and float16, not float32"),
        (replace(H100, attention_forms={AttentionForm(64, has_alibi=True)}), "it has no ALiBi"),
        (replace(H100, attention_forms={AttentionForm(100)}), "no heads of 100 numbers"),
        (replace(H100, attention_forms={AttentionForm(320, 256)}), "rows of 576 numbers, not 320"),
    ],
)
def test_what_it_does_not_compute(library: FlashLibrary, requirements: BackendRequirements, reason: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "kernels", None)  # nothing is searched for
        found = flash_attention.offer(requirements)
    assert isinstance(found, str)
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


def test_what_may_go_wrong_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **arguments: object) -> FlashLibrary:
        raise OSError("no connection\nmore")

    class Wrong(FlashLibrary):
        def flash_attn_with_kvcache(self, q: Tensor, *args: Any, **arguments: Any) -> Tensor:  # type: ignore[override]
            return super().flash_attn_with_kvcache(q, *args, **arguments | {"softmax_scale": 0.05})

    class Old(FlashLibrary):
        def get_scheduler_metadata(self, *args: Any) -> Tensor:  # type: ignore[override]
            raise AssertionError

    def offer_with(package: object) -> object:
        monkeypatch.setitem(sys.modules, "kernels", package)
        return flash_attention.offer(H100)

    assert offer_with(None) == "the extra serve-llm[cuda] is not installed"
    assert offer_with(SimpleNamespace()) == "the extra serve-llm[cuda] is not installed"  # another package so named
    repository = flash_attention.REPOSITORY
    assert offer_with(SimpleNamespace(get_kernel=fails)) == f"{repository} cannot be loaded: no connection"
    wrong = offer_with(SimpleNamespace(get_kernel=lambda *_, **__: Wrong()))
    assert wrong == "its results were wrong in a trial with heads of 128"
    old = offer_with(SimpleNamespace(get_kernel=lambda *_, **__: Old()))
    assert isinstance(old, str) and "it failed in a trial: " in old and "unexpected keyword argument" in old
