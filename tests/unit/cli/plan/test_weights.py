"""The counted bytes are those that the loader is asked for, and those that the decoder then holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve_llm.cli.plan.weights import weight_bytes
from serve_llm.common.hub import read_config
from serve_llm.engine.model.build import ModelBuilder, WeightSlice, is_float32
from serve_llm.engine.model.decoder import Decoder, build_decoder
from serve_llm.engine.model.quantization_spec import Int8Spec, find_linear_layer
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.kernels.registry import choose
from support import published, resident
from support.matrix import mostly_slow
from support.ranks import Ranks
from support.tiny import make_checkpoint

GRIDS = [(tensor, pipeline) for tensor in (1, 2, 3) for pipeline in (1, 2)] + [(8, 1)]
VARIANTS = {
    "llama": {},
    "llama-biases-tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-one-kv-head": {"num_key_value_heads": 1, "num_attention_heads": 5, "hidden_size": 65},
    "mistral": {},
    "qwen-biases": {"no_bias": False},
    "llama4_text": {},
    "llama4_text-biases": {"attention_bias": True, "use_qk_norm": False},
    "qwen2": {},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3-biases": {"attention_bias": True, "tie_word_embeddings": False},
    "granite": {},
    "olmo2": {},
    "olmo3": {},
    "phi3": {},
    "starcoder2": {},
    "seed_oss": {},
    "smollm3": {},
    "nemotron-biases": {"attention_bias": True, "mlp_bias": True},
    "glm": {},
    "glm4": {},
    "cohere": {},
    "cohere-no-head-norm": {"use_qk_norm": False},
    "cohere2": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text-biases": {"attention_bias": True},
    "stablelm": {},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "granitemoeshared": {},
    "gpt_oss": {},
    "deepseek_v2": {},
    "deepseek_v3": {"attention_bias": True},
    "glm4_moe": {},
    "stablelm-parallel": {"use_parallel_residual": True},
    "gpt_neox": {},
    "gptj": {},
    "falcon": {},
    "bloom": {},
    "mpt": {},
    "falcon-one-norm": {"num_ln_in_parallel_attn": 1, "bias": True},
    "gpt2": {},
    "gpt2-untied": {"tie_word_embeddings": False},
    "opt": {},
    "opt-narrow-post": {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "opt-bare": {"enable_bias": False, "layer_norm_elementwise_affine": False},
}


QUANTISED = ["llama", "llama-one-kv-head", "qwen2-tied", "gpt2", "opt-narrow-post", "qwen2_moe", "qwen3_moe"]


def build(
    spec: ModelSpec, grid: ParallelLayout, rank: int, device: str, model_dtype: torch.dtype
) -> tuple[Decoder, int]:
    """Build the rank's decoder with empty tensors. Returns it and the bytes that it requested from the loader."""
    asked = 0

    def load(
        name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        nonlocal asked
        own = list(shape)
        if part is not None:
            own[part.dimension] = len(part.range)
        kind = torch.float32 if is_float32(name) else dtype or model_dtype
        if (
            spec.int8 is not None
            and spec.int8.in_checkpoint
            and (product := find_linear_layer(name))
            and spec.int8.is_quantised(product)
        ):
            kind = torch.int8
        tensor = torch.zeros(own, dtype=kind, device=device)
        asked += tensor.nbytes
        return tensor

    ranks = Ranks(spec, grid)
    kernels = choose(torch.device(device), model_dtype, {layer.attention.head_dim for layer in spec.layers})
    builder = ModelBuilder(
        load,
        kernels,
        ranks.shards[rank],
        ranks.neighbours[rank],
        spec.int8,
        spec.fp8,
        dtype=model_dtype,
        device=torch.device(device),
    )
    return build_decoder(spec, builder, torch.device("cpu")), asked


@pytest.mark.parametrize("variant", mostly_slow(VARIANTS, ["gpt2", "mixtral", "deepseek_v3"]))
def test_tiny_models(variant: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, variant.split("-")[0], **VARIANTS[variant])
    spec, _ = read_model(read_config(tmp_path))
    for tensor, pipeline in GRIDS:
        grid = ParallelLayout(tensor, pipeline)
        for rank in range(grid.size):
            shard = build_shard(spec, grid, rank)
            for dtype in (torch.bfloat16, torch.float32):
                decoder, asked = build(spec, grid, rank, "cpu", dtype)
                expected = weight_bytes(spec, shard, dtype.itemsize, "cpu")
                assert expected.loaded == asked
                if torch.backends.cpu.get_cpu_capability() == "AVX512":
                    assert expected.held == resident.weight_bytes(decoder)
            decoder, asked = build(spec, grid, rank, "meta", torch.bfloat16)
            expected = weight_bytes(spec, shard, 2, "cuda")
            assert (expected.loaded, expected.held) == (asked, resident.weight_bytes(decoder))


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="packed in another layout here")
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("variant", mostly_slow(QUANTISED, ["llama-one-kv-head", "qwen2_moe"]))
def test_int8(variant: str, stored: bool, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, variant.split("-")[0], **VARIANTS[variant])
    plain, _ = read_model(read_config(tmp_path))
    qkv = {f"layers.1.attention.{name}" for name in "qkv"}
    spec = replace(plain, int8=Int8Spec(stored, frozenset({"layers.2.ffn.down", *qkv})))
    for tensor, pipeline in GRIDS:
        grid = ParallelLayout(tensor, pipeline)
        for rank in range(grid.size):
            for dtype in (torch.bfloat16, torch.float32):
                decoder, asked = build(spec, grid, rank, "cpu", dtype)
                expected = weight_bytes(spec, build_shard(spec, grid, rank), dtype.itemsize, "cpu")
                assert (expected.loaded, expected.held) == (asked, resident.weight_bytes(decoder))


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        ("LLAMA_1B", 1, 1),
        ("LLAMA_8B", 1, 1),
        ("LLAMA_8B", 3, 2),
        ("LLAMA_70B", 4, 1),
        ("LLAMA_70B", 2, 4),
        ("LLAMA_405B", 8, 2),
        ("LLAMA2_13B", 6, 1),
        ("MISTRAL_7B", 2, 1),
        ("QWEN2_7B", 8, 1),
        ("QWEN2_HALF_B", 4, 1),
        ("QWEN3_32B", 5, 1),
        ("GPT2_XL", 2, 2),
        ("OPT_30B", 3, 1),
        ("MIXTRAL_8X7B", 2, 1),
    ],
)
def test_large_models(name: str, tensor: int, pipeline: int) -> None:
    """With tensors that have only a shape: the bytes requested from the loader on every rank, and those held on a
    GPU."""
    spec, _ = read_model(getattr(published, name))
    grid = ParallelLayout(tensor, pipeline)
    for rank in range(grid.size):
        decoder, asked = build(spec, grid, rank, "meta", torch.bfloat16)
        expected = weight_bytes(spec, build_shard(spec, grid, rank), 2, "cuda")
        assert (expected.loaded, expected.held) == (asked, resident.weight_bytes(decoder))


@pytest.mark.parametrize("variant", [variant for variant in QUANTISED if not variant.endswith("moe")])
def test_fp8(variant: str, tmp_path: Path) -> None:
    """Experts in fp8 are weights in groups: see test_packed_weights.py."""
    make_checkpoint(tmp_path, variant.split("-")[0], **VARIANTS[variant])
    spec = read_model(read_config(tmp_path))[0].with_fp8()
    for tensor, pipeline in GRIDS:
        grid = ParallelLayout(tensor, pipeline)
        for rank in range(grid.size):
            decoder, asked = build(spec, grid, rank, "meta", torch.bfloat16)
            expected = weight_bytes(spec, build_shard(spec, grid, rank), 2, "cuda")
            assert (expected.loaded, expected.held) == (asked, resident.weight_bytes(decoder))
            assert grid.size > 1 or expected.held < expected.loaded  # padding is larger relative to small shares
