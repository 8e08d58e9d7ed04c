"""Checkpoints that were calibrated for a KV cache in fp8: keys and values are stored divided by the scales."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_llm.common.errors import ModelError
from serve_llm.kernels import cache_fp8
from support.engine import Result, generate, greedy
from support.gpu_path import KERNELS, assert_same, make_gpu_engine
from support.packed_floats import FLOAT8, make_packed
from support.quantised import edit_config

SCHEME = FLOAT8 | {"strategy": "tensor", "dynamic": False}
PER_HEAD = "per head"
CASES: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {  # family, form, config, names of scales
    "compressed-tensors": ("llama", "fp8-channel", {"kv_cache_scheme": SCHEME}, ("k_scale", "v_scale")),
    PER_HEAD: (
        "llama",
        "fp8-tensor",
        {"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}},
        ("k_scale", "v_scale"),
    ),
    "projections": (
        "llama",
        "fp8-tensor",
        {"kv_cache_scheme": SCHEME},
        ("k_proj.output_scale", "v_proj.output_scale"),
    ),
    "AutoFP8": ("llama", "autofp8", {"kv_cache_scheme": "static"}, ("kv_scale",)),
    "Model Optimizer": (
        "llama",
        "modelopt-fp8",
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
        ("k_proj.k_scale", "v_proj.v_scale"),
    ),
    "latent": ("deepseek_v3", "fp8-native", {}, ("k_scale", "v_scale")),
}


def make_calibrated(directory: Path, case: str) -> Path:
    """Write the checkpoint. Some keys and values exceed what the scaled cache can hold. Scales are powers of two, so
    that dividing by them does not change the bits of results."""
    family, form, config, names = CASES[case]
    make_packed(directory, family, form)
    edit_config(directory / "packed", lambda stored: stored.update(config))
    path = directory / "packed" / "model.safetensors"
    tensors = load_file(path)
    shape = (2, 1, 1) if case == PER_HEAD else (1,)
    generator = torch.Generator().manual_seed(5)
    modules = {name.partition(".self_attn.")[0] for name in tensors if ".self_attn." in name}
    for module in sorted(modules):
        for name in names:
            tensors[f"{module}.self_attn.{name}"] = 2.0 ** torch.randint(-12, -5, shape, generator=generator)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory / "packed"


def write_rounded(write: Callable[..., Tensor], *arguments: Any, cache_scales: Tensor) -> Tensor:
    """Round the contents of a floating-point cache after each write, as fp8 would; rounding twice changes nothing."""
    result = write(*arguments)
    cache = arguments[-2]
    scales = cache_scales[:, :, None, None]
    cache.copy_(cache_fp8.quantise(cache / scales).float() * scales)
    return result


def attend(*arguments: Any, cache_scales: Tensor, **how: Any) -> Tensor:
    """Compute attention over a floating-point cache."""
    return KERNELS.paged_attention(*arguments, **how)


ROUNDED = replace(
    KERNELS,
    paged_attention=attend,
    rope_and_cache=partial(write_rounded, KERNELS.rope_and_cache),
    rope_and_latent=partial(write_rounded, KERNELS.rope_and_latent),
)


@pytest.mark.parametrize("case", CASES)
def test_equals_a_cache_of_rounded_floats(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_calibrated(tmp_path, case)

    def run(**how: Any) -> dict[int, Result]:
        engine = make_gpu_engine(directory, monkeypatch, block_size=8, **how)
        prompts = [[(7 * number + step) % 50 for step in range(3 + 6 * number)] for number in range(3)]
        return generate(engine, [greedy(number, prompt, 6, logprobs=1) for number, prompt in enumerate(prompts)])

    expected = run(kernels=ROUNDED)
    assert_same(run(kv_cache_dtype="fp8"), expected)
    # Sums over ranks are rounded otherwise, so that a number between two of fp8 may become the other one.
    assert_same(run(kv_cache_dtype="fp8", tensor=2), expected, tolerance=5e-3)
    if case == PER_HEAD:
        assert_same(run(kv_cache_dtype="fp8", tensor=3), expected, tolerance=5e-3)
        assert_same(run(kv_cache_dtype="fp8", stages=2), expected)
    edit_config(directory, lambda stored: stored.update(kv_cache_scheme={"num_bits": 8, "type": "int"}))
    if case != "AutoFP8":
        with pytest.raises(AssertionError):
            assert_same(run(kv_cache_dtype="fp8"), expected)


def test_layers_without_scales_use_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_calibrated(tmp_path, PER_HEAD)
    change_scales(directory, lambda name, tensor: None if ".1.self_attn.k_scale" in name else tensor)
    generate(make_gpu_engine(directory, monkeypatch, kv_cache_dtype="fp8"), [greedy(0, [1, 2, 3], 2)])
    change_scales(directory, lambda name, tensor: None if ".1.self_attn.v_scale" in name else tensor)
    with caplog.at_level(logging.WARNING):
        make_gpu_engine(directory, monkeypatch, kv_cache_dtype="fp8")
    assert "1 of 3 layers have no scales of keys and values for the KV cache in fp8; they use 1" in caplog.text


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3), "k_scale has 3 numbers, but there must be 1 or 2, one per KV head"),
        (torch.zeros(1), "k_scale: scales of a KV cache must be above 0 and finite"),
        (torch.tensor([1.0, torch.nan]), "k_scale: scales of a KV cache must be above 0 and finite"),
    ],
)
def test_other_scales_are_refused(scale: Tensor, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_calibrated(tmp_path, PER_HEAD)
    change_scales(directory, lambda name, stored: scale if name == "model.layers.1.self_attn.k_scale" else stored)
    with pytest.raises(ModelError, match=rf"^model\.layers\.1\.self_attn\.{message}$"):
        make_gpu_engine(directory, monkeypatch, kv_cache_dtype="fp8")


def change_scales(directory: Path, change: Callable[[str, Tensor], Tensor | None]) -> None:
    path = directory / "model.safetensors"
    changed = {name: change(name, tensor) for name, tensor in load_file(path).items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path)
