"""Every family's decoder against transformers, without the engine: logprobs, greedy tokens, kinds of checkpoints."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reference import (
    activation,
    attention,
    delta_rule,
    linear,
    linear_fp8,
    linear_grouped,
    linear_int8,
    moe,
    norm,
    rope,
)
from serve_llm.engine.model.build import ModelBuilder
from serve_llm.engine.model.decoder import build_decoder
from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.weights.files import Checkpoint
from serve_llm.engine.weights.load import match_tensors
from serve_llm.engine.weights.parameters import CheckpointLoader
from serve_llm.kernels.cpu import library
from serve_llm.kernels.registry import PORTABLE
from support.forward import CPU, Harness, load
from support.matrix import mostly_slow
from support.reference import reference_greedy, reference_logprobs
from support.tiny import FAMILIES, HYBRIDS, ROPE_SCALINGS, make_checkpoint

REFERENCE = replace(
    PORTABLE,
    paged_attention=attention.paged_attention,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    layer_norm=norm.layer_norm,
    add_layer_norm=norm.add_layer_norm,
    rope_and_cache=rope.rope_and_cache,
    rope_and_latent=rope.rope_and_latent,
    gated_delta_rule=delta_rule.gated_delta_rule,
    activations={name: getattr(activation, name) for name in PORTABLE.activations},
    pack=linear.pack,
    pack_heads=linear.pack_heads,
    pack_int8=linear_int8.pack_int8,
    pack_fp8=linear_fp8.pack_fp8,
    pack_grouped=linear_grouped.pack_grouped,
    pack_experts=moe.pack_experts,
)
# For logprobs in float32, compared with transformers in float64. In float32, transformers itself is off by up to 4e-4.
TOLERANCE = 2.5e-4
HYBRID_TOLERANCE = 5e-4  # gates amplify rounding errors: 2.1e-4 without compiled kernels on a Xeon with AMX
LENGTHS = (1, 2, 15, 16, 17, 40, 131, 150)  # blocks have 16, windows 21 and 37, key tiles 128 tokens

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-linear": ("llama", {"rope": "linear"}),
    "llama-llama3": ("llama", {"rope": "llama3"}),
    "llama-yarn": ("llama", {"rope": "yarn"}),
    "llama-dynamic": ("llama", {"rope": "dynamic"}),
    "llama-biases-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 5, "hidden_size": 65}),
    "llama-no-groups": ("llama", {"num_key_value_heads": 6, "num_hidden_layers": 1, "head_dim": 10}),
    "llama-compiled": ("llama", {"head_dim": 16}),  # other head sizes have no compiled attention
    "mistral-compiled": ("mistral", {"head_dim": 24}),
    "gpt2-compiled": ("gpt2", {"n_embd": 96}),
    "llama4-compiled": ("llama4_text", {"head_dim": 16, "rope": "llama3"}),
    "llama4-plain-biases-tied": (
        "llama4_text",
        {
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "moe_layers": [0, 2],
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
        },
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-window-1": ("mistral", {"sliding_window": 1}),
    "qwen-biases-partial": ("qwen", {"no_bias": False, "rotary_pct": 0.6, "use_dynamic_ntk": False}),
    "qwen-compiled": ("qwen", {"hidden_size": 96, "kv_channels": 16, "tie_word_embeddings": True}),
    "qwen2-full": ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": True}),
    "qwen2-all-sliding": ("qwen2", {"max_window_layers": 0}),
    "qwen3-mixed-biases": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 30,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "granite-tied-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "olmo2-tied-biases": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo2-compiled": ("olmo2", {"hidden_size": 96}),
    "phi3-partial-tied": (
        "phi3",
        {
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.6},
            "tie_word_embeddings": True,
            "sliding_window": None,
        },
    ),
    "starcoder2-no-biases": ("starcoder2", {"use_bias": False, "tie_word_embeddings": True, "sliding_window": None}),
    "starcoder2-compiled": ("starcoder2", {"hidden_size": 96, "std": 0.2}),
    "smollm3-every-fourth": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4, "std": 0.2}),
    "smollm3-chosen-biases": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": False}),
    "stablelm-head-norms": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}),
    "stablelm-compiled": (
        "stablelm",
        {
            "hidden_size": 96,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
    ),
    "nemotron-biases-tied": (
        "nemotron",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.67},
        },
    ),
    "nemotron-compiled": ("nemotron", {"head_dim": 16}),
    "glm4-whole-heads-tied": (
        "glm4",
        {
            "attention_bias": False,
            "head_dim": 14,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 1.0},
        },
    ),
    "glm4-compiled": ("glm4", {"head_dim": 16}),
    "gpt_neox-one-after-the-other": (
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True, "hidden_act": "relu"},
    ),
    "gpt_neox-compiled": (
        "gpt_neox",
        {
            "hidden_size": 96,
            "rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.25},
        },
    ),
    "falcon-7b": ("falcon", {"new_decoder_architecture": False}),  # one key and value head
    "falcon-11b": ("falcon", {"num_ln_in_parallel_attn": 1, "bias": True, "tie_word_embeddings": False}),
    "falcon-one-after-the-other": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "num_kv_heads": 6},
    ),
    "falcon-compiled": ("falcon", {"hidden_size": 96, "ffn_hidden_size": None, "rope": "linear"}),
    "gptj-tied-whole-heads": ("gptj", {"rotary_dim": 10, "n_inner": None, "tie_word_embeddings": True}),
    "gptj-compiled": ("gptj", {"n_embd": 96}),
    "cohere-biases-untied": ("cohere", {"use_qk_norm": False, "attention_bias": True, "tie_word_embeddings": False}),
    "cohere-compiled": ("cohere", {"hidden_size": 96}),
    "cohere2-every-fourth": ("cohere2", {"num_hidden_layers": 5, "sliding_window_pattern": 4, "attention_bias": True}),
    "mixtral-compiled-tied": (
        "mixtral",
        {"head_dim": 16, "sliding_window": None, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "qwen2_moe-normalised-sparse": (
        "qwen2_moe",
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 30,
        },
    ),
    "qwen2_moe-all-dense": ("qwen2_moe", {"mlp_only_layers": [0, 1, 2], "num_experts_per_tok": 1, "std": 0.2}),
    "qwen3_moe-all-chosen": ("qwen3_moe", {"num_experts_per_tok": 5, "norm_topk_prob": False, "mlp_only_layers": []}),
    "qwen3_moe-sliding-biases": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 30, "attention_bias": True},
    ),
    "granitemoeshared-none": ("granitemoeshared", {"shared_intermediate_size": 0, "attention_bias": True}),
    "deepseek_v2-groups-yarn": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "q_lora_rank": 20,
            "attention_bias": True,
            "rope_parameters": {**ROPE_SCALINGS["yarn"], "rope_theta": 500.0, "mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    "deepseek_v2-dense-tied-wide": (
        "deepseek_v2",
        {"first_k_dense_replace": 3, "tie_word_embeddings": True, "kv_lora_rank": 570, "std": 0.2},
    ),
    "deepseek_v3-halves": (
        "deepseek_v3",
        {
            "rope_interleave": False,
            "q_lora_rank": None,
            "kv_lora_rank": 27,  # rows without a compiled kernel
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "glm4_moe-groups": (
        "glm4_moe",
        {"attention_bias": False, "use_qk_norm": False, "n_group": 3, "topk_group": 2, "n_shared_experts": 2},
    ),
    "deepseek_v3-biases-yarn": (
        "deepseek_v3",
        {
            "attention_bias": True,
            "rope_parameters": {**ROPE_SCALINGS["yarn"], "rope_theta": 500.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "n_shared_experts": 2,
        },
    ),
    "gemma2-plain-untied": (
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2-compiled": ("gemma2", {"head_dim": 24}),
    "gemma3-softcap-untied": (
        "gemma3_text",
        {
            "final_logit_softcapping": 9.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": None,
        },
    ),
    "gemma3-compiled": ("gemma3_text", {"head_dim": 24, "num_hidden_layers": 7, "sliding_window_pattern": 6}),
    "gpt_oss-yarn-compiled": (
        "gpt_oss",
        {
            "head_dim": 16,
            # With 500, one token's router decides between two experts by 5e-5, so by rounding.
            "rope_parameters": {**ROPE_SCALINGS["yarn"], "rope_theta": 700.0, "truncate": False},
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gpt2-untied-inverse": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    "gpt2-gelu-unscaled": ("gpt2", {"activation_function": "gelu", "scale_attn_weights": False, "n_inner": None}),
    "bloom-compiled": ("bloom", {"hidden_size": 96, "n_head": 4}),
    "bloom-untied-one-head": ("bloom", {"hidden_size": 24, "n_head": 1, "tie_word_embeddings": False}),
    "mpt-compiled": ("mpt", {"d_model": 96, "attn_config": {}}),
    "mpt-untied": ("mpt", {"n_heads": 4, "tie_word_embeddings": False}),
    "opt-post-narrow": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 33}),
    "opt-bare": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"}),
    "opt-no-final-norm": ("opt", {"_remove_final_layer_norm": True, "tie_word_embeddings": False, "std": 0.15}),
}


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize(
    "variant", mostly_slow(VARIANTS, [*FAMILIES, "llama-compiled", "mixtral-compiled-tied", "gpt_oss-yarn-compiled"])
)
def test_float32(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    chosen = prompts(make_checkpoint(tmp_path, family, **overrides))
    spec, decoder = load(tmp_path)
    whole = Harness(spec, decoder, torch.float32).logprobs(chosen)
    chunked = Harness(spec, decoder, torch.float32, block_size=8, seed=1).logprobs(chosen, max_chunk=37)
    for prompt, ours, again in zip(chosen, whole, chunked, strict=True):
        theirs = reference_logprobs(tmp_path, prompt, "float64")
        error = (ours - theirs).abs().max()
        assert error < (HYBRID_TOLERANCE if family in HYBRIDS else TOLERANCE)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
        assert torch.equal(ours, again)  # to the last bit
    assert whole[-1].max(-1).values.exp().mean() > 0.05  # 1/331 would be a flat distribution, which proves nothing


@pytest.mark.parametrize("family", mostly_slow(FAMILIES))
def test_without_compiled_kernels(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find", lambda: None)
    test_float32(family, tmp_path)


@pytest.mark.parametrize(
    "variant", ["llama-compiled", "opt-post-narrow", "gpt2", "olmo2", "stablelm-parallel", "falcon"]
)
def test_wanted_rows_are_those_of_all(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, overrides = VARIANTS[variant]
    chosen = prompts(make_checkpoint(tmp_path, family, **overrides))
    spec, decoder = load(tmp_path)
    forward = decoder.forward

    def both(inputs: StepInputs, caches: list[torch.Tensor]) -> torch.Tensor:
        whole = forward(inputs, caches)
        wanted = torch.tensor(sorted({0, len(whole) // 2, len(whole) - 1}))
        assert torch.equal(forward(inputs, caches, wanted), whole[wanted])
        return whole

    monkeypatch.setattr(decoder, "forward", both)
    Harness(spec, decoder, torch.float32).logprobs(chosen, max_chunk=37)


@pytest.mark.parametrize("variant", mostly_slow(FAMILIES))
def test_greedy_decode(variant: str, tmp_path: Path) -> None:
    chosen = prompts(make_checkpoint(tmp_path, variant, seed=3))
    spec, decoder = load(tmp_path)
    ours = Harness(spec, decoder, torch.float32).greedy(chosen, 8)
    assert ours == [reference_greedy(tmp_path, prompt, 8)[0] for prompt in chosen]


def test_dynamic_rope_beyond_its_length(tmp_path: Path) -> None:
    """Generation continues past the trained length, where transformers changes the base with every token."""
    make_checkpoint(tmp_path, "llama", rope="dynamic", max_position_embeddings=64)
    spec, decoder = load(tmp_path)
    assert spec.max_position == 128
    prompt = [n * 37 % 331 for n in range(60)]
    (ours,) = Harness(spec, decoder, torch.float32).greedy([prompt], 50)
    assert ours == reference_greedy(tmp_path, prompt, 50)[0]


@pytest.mark.parametrize("variant", mostly_slow(FAMILIES))
def test_bfloat16(variant: str, tmp_path: Path) -> None:
    """The logprobs of float32's greedy tokens differ by less than 0.05 on average, as do transformers' own."""
    chosen = prompts(make_checkpoint(tmp_path, variant, std=0.1))
    spec, decoder = load(tmp_path, torch.bfloat16)
    ours = torch.cat(Harness(spec, decoder, torch.bfloat16).logprobs(chosen, max_chunk=50))
    exact = torch.cat([reference_logprobs(tmp_path, prompt) for prompt in chosen])
    theirs = torch.cat([reference_logprobs(tmp_path, prompt, "bfloat16") for prompt in chosen])
    likeliest = exact.argmax(-1, keepdim=True)
    error = (ours - exact).gather(1, likeliest).abs().mean()
    their_error = (theirs - exact).gather(1, likeliest).abs().mean()
    assert error < 0.05
    assert error < 1.5 * their_error


@pytest.mark.parametrize("family", mostly_slow(FAMILIES))
def test_reference_kernels_run_the_whole_model(family: str, tmp_path: Path) -> None:
    chosen = prompts(make_checkpoint(tmp_path, family))[:6]
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))
    checkpoint = Checkpoint(tmp_path)
    sources = match_tensors(checkpoint, spec, weight_map, str(tmp_path))[1]
    load_parameter = CheckpointLoader(checkpoint, sources, torch.float32, CPU)
    plain = build_decoder(
        spec, ModelBuilder(load_parameter, REFERENCE, build_shard(spec, ParallelLayout(), 0), ProcessGroups()), CPU
    )
    for prompt, ours in zip(chosen, Harness(spec, plain, torch.float32).logprobs(chosen, max_chunk=9), strict=True):
        assert (ours - reference_logprobs(tmp_path, prompt)).abs().max() < TOLERANCE


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_half_precision_files_in_float32(stored: str, tmp_path: Path) -> None:
    chosen = prompts(make_checkpoint(tmp_path, "llama", dtype=stored))
    spec, decoder = load(tmp_path)
    for prompt, ours in zip(chosen, Harness(spec, decoder, torch.float32).logprobs(chosen), strict=True):
        assert (ours - reference_logprobs(tmp_path, prompt)).abs().max() < TOLERANCE


WITHOUT_YARN = ("gpt2", "opt", "gptj", "phi3", "qwen", "llama4_text", "bloom", "mpt")


@pytest.mark.parametrize("family", mostly_slow(FAMILIES))
def test_old_config_and_shards(family: str, tmp_path: Path) -> None:
    """Files in transformers 4's format, with several shards, are the same model."""
    new, old = tmp_path / "new", tmp_path / "old"
    rope = {} if family in WITHOUT_YARN else {"rope": "yarn"}
    chosen = prompts(make_checkpoint(new, family, **rope))
    make_checkpoint(old, family, old_config=True, max_shard_size="50KB", **rope)
    assert len(list(old.glob("*.safetensors"))) > 2
    spec, decoder = load(new)
    old_spec, old_decoder = load(old)
    assert old_spec == spec
    ours = Harness(spec, decoder, torch.float32).logprobs(chosen)
    theirs = Harness(old_spec, old_decoder, torch.float32).logprobs(chosen)
    assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))
