"""Layers in fp8 on a CPU, which also supports torch's scaled product: close to transformers with any kernels."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from reference import linear_fp8 as reference
from serve_llm.common.errors import OptionError
from serve_llm.engine.model.build import ModelBuilder
from serve_llm.engine.model.decoder import build_decoder
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.weights import load
from serve_llm.engine.weights.files import Checkpoint
from serve_llm.engine.weights.load import match_tensors
from serve_llm.engine.weights.parameters import CheckpointLoader
from serve_llm.kernels import linear_fp8
from serve_llm.kernels.registry import PORTABLE, Kernels
from support.engine import generate, greedy, make_engine
from support.forward import CPU, Harness, load_whole
from support.reference import reference_logprobs
from support.tiny import make_checkpoint

pytestmark = pytest.mark.skipif(
    not linear_fp8.is_supported(CPU), reason="this torch has no product of 8-bit floats on a CPU"
)
BF16 = torch.bfloat16


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 16, 17, 40, 150)]


def logprobs(directory: Path, chosen: list[list[int]], kernels: Kernels) -> Tensor:
    """Return the logprobs of the fp8 checkpoint, those of all prompts stacked."""
    spec, weight_map = read_model(json.loads((directory / "config.json").read_text()))
    spec = spec.with_fp8()
    checkpoint = Checkpoint(directory)
    read = CheckpointLoader(checkpoint, match_tensors(checkpoint, spec, weight_map, str(directory))[1], BF16, CPU)
    builder = ModelBuilder(
        read, kernels, build_shard(spec, ParallelLayout(), 0), ProcessGroups(), fp8=spec.fp8, dtype=BF16
    )
    return torch.cat(Harness(spec, build_decoder(spec, builder, CPU), BF16).logprobs(chosen))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "opt"])
def test_close_to_the_float_model(family: str, tmp_path: Path) -> None:
    """Random weights: the measured error of logprobs is 6 to 10 % of their spread."""
    chosen = prompts(make_checkpoint(tmp_path, family, std=0.1))
    ours = logprobs(tmp_path, chosen, PORTABLE)
    exact = torch.cat([reference_logprobs(tmp_path, prompt) for prompt in chosen])
    spread = exact - exact.mean(-1, keepdim=True)
    assert 0.01 < (ours - exact).norm() / spread.norm() < 0.14
    defined = logprobs(tmp_path, chosen, replace(PORTABLE, pack_fp8=reference.pack_fp8))
    assert (ours - defined).norm() / spread.norm() < 0.02  # some values round differently


def test_loaded_as_the_option_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All linear layers are fp8, fused ones as a whole, but not the head."""
    make_checkpoint(tmp_path, "llama", dtype="bfloat16")
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))
    packed: list[tuple[torch.dtype, int]] = []
    pack = linear_fp8.pack_fp8

    def noted(weight: Tensor, scale: Tensor, bias: Tensor | None) -> linear_fp8.Linear:
        packed.append((weight.dtype, weight.shape[0]))
        return pack(weight, scale, bias)

    monkeypatch.setattr(load, "choose", lambda *args, **more: replace(PORTABLE, pack_fp8=noted))
    load_whole(tmp_path, spec.with_fp8(), weight_map, dtype=BF16)
    mixer, ffn = spec.layers[0].attention, spec.layers[0].ffn
    qkv = (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim
    assert packed == [
        (linear_fp8.DTYPE, outputs) for outputs in (qkv, spec.hidden_size, 2 * ffn.intermediate_size, spec.hidden_size)
    ] * len(spec.layers)
    packed.clear()
    load_whole(tmp_path, spec, weight_map, dtype=BF16)
    assert not packed


def test_refused_where_there_is_no_such_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama", dtype="bfloat16")
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))
    monkeypatch.setattr("serve_llm.engine.quantization.fp8.is_supported", lambda device: False)
    with pytest.raises(OptionError, match=r"^--quantization fp8: this GPU.*compute capability 8\.9"):
        load_whole(tmp_path, spec.with_fp8(), weight_map, dtype=BF16)


@pytest.mark.parametrize(("family", "most"), [("llama", 0.1), ("gpt2", 0.1), ("qwen3_moe", 0.2)])
def test_weights_alone_on_a_cpu(family: str, most: float, tmp_path: Path) -> None:
    """On a CPU, `--quantization fp8` rounds weights only: closer than with rounded activations, and the same on two
    stages. Occasionally, other experts are chosen."""
    vocab_size = make_checkpoint(tmp_path, family, std=0.1)
    chosen = prompts(vocab_size)
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))
    spec = spec.with_fp8_weights()
    ours = torch.cat(Harness(spec, load_whole(tmp_path, spec, weight_map), torch.float32).logprobs(chosen))
    exact = torch.cat([reference_logprobs(tmp_path, prompt) for prompt in chosen])
    spread = exact - exact.mean(-1, keepdim=True)
    assert 0.001 < (ours - exact).norm() / spread.norm() < most
    wanted = [greedy(number, prompt, 4, logprobs=0) for number, prompt in enumerate(chosen)]
    one = generate(make_engine(tmp_path, quantization="fp8"), wanted)
    two = generate(make_engine(tmp_path, quantization="fp8", pipeline=2), wanted)
    assert all(two[number].logprobs == result.logprobs for number, result in one.items())
