"""config.json of published DeepSeek, GLM-4.5 and gpt-oss models: what is read, and what is refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest

from serve_llm.cli.plan.weights import weight_bytes
from serve_llm.common.errors import ModelError
from serve_llm.engine.config import KVCacheFormat
from serve_llm.engine.model.mtp_spec import read_mtp
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.model.spec import AttentionSpec, GroupedTopK, MLASpec, MLPSpec, MoESpec, RouterSpec
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.worker.kv_cache import plan_cache

DEEPSEEK_V2_LITE = """{"architectures": ["DeepseekV2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 100000,
"eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
"initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
"model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
"n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts_per_tok": 6,
"num_hidden_layers": 27, "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": null, "qk_nope_head_dim": 128,
"qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
"mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn"},
"rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": true,
"tie_word_embeddings": false, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
"transformers_version": "4.33.1", "use_cache": true, "v_head_dim": 128, "vocab_size": 102400}"""
DEEPSEEK_V3 = """{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "bos_token_id": 0,
"eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
"initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
"model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
"n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8,
"num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32,
"beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
"type": "yarn"}, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": true,
"tie_word_embeddings": false, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
"transformers_version": "4.33.1", "use_cache": true, "v_head_dim": 128, "vocab_size": 129280}"""
GLM_4_5_AIR = """{"architectures": ["Glm4MoeForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
"eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
"hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
"model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
"norm_topk_prob": true, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
"num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
"rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
"tie_word_embeddings": false, "topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.54.0",
"use_cache": true, "use_qk_norm": false, "vocab_size": 151552}"""
GPT_OSS_20B = """{"architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
"eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
"initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": [TYPES],
"max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
"num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false,
"pad_token_id": 199999, "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn",
"model.layers.*.mlp.router", "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
"rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
"rope_type": "yarn", "truncate": false}, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
"swiglu_limit": 7.0, "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true,
"vocab_size": 201088}""".replace("TYPES", ", ".join(['"sliding_attention", "full_attention"'] * 12))


def test_glm_moe() -> None:
    """GLM-4.5-Air has 107 billion parameters without its layer for multi-token prediction."""
    spec, weights = read_model(json.loads(GLM_4_5_AIR))
    attention, ffn = spec.layers[0].attention, spec.layers[1].ffn
    assert [type(layer.ffn) for layer in spec.layers] == [MLPSpec, *[MoESpec] * 45]
    assert isinstance(attention, AttentionSpec) and isinstance(ffn, MoESpec)
    assert (attention.qkv_bias, attention.output_bias, attention.qk_norm) == (True, False, None)
    assert attention.rope is not None and attention.rope.rotary_dim == 64
    assert (ffn.router.scoring, ffn.router.correction_bias, ffn.router.num_experts) == ("sigmoid", True, 128)
    assert any(re.fullmatch(pattern, "model.layers.46.eh_proj.weight") for pattern in weights.ignored)
    parameters = weight_bytes(spec, build_shard(spec, ParallelLayout(), 0), 2, "cuda").loaded / 2e9
    assert parameters == pytest.approx(107, abs=0.5)


def test_deepseek() -> None:
    lite = read_model(json.loads(DEEPSEEK_V2_LITE))[0]
    (group,) = lite.kv_groups
    assert (group.num_kv_heads, group.head_dim, group.is_latent, len(group.layers)) == (1, 576, True, 27)
    assert [type(layer.ffn) for layer in lite.layers] == [MLPSpec, *[MoESpec] * 26]
    ffn, mixer = lite.layers[1].ffn, lite.layers[0].attention
    assert isinstance(ffn, MoESpec) and isinstance(mixer, MLASpec)
    assert ffn.router == RouterSpec(64, 6, renormalise=False, float32=True)
    assert ffn.shared_expert is not None and ffn.shared_expert.intermediate_size == 2816
    assert mixer.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert weight_bytes(lite, build_shard(lite, ParallelLayout(), 0), 2, "cuda").loaded / 2e9 == pytest.approx(
        15.7, abs=0.05
    )

    large, weights = read_model(json.loads(DEEPSEEK_V3))
    assert (large.max_position, [type(layer.ffn) for layer in large.layers]) == (
        163840,
        [*[MLPSpec] * 3, *[MoESpec] * 58],
    )
    router = large.layers[-1].ffn.router
    assert (router.groups, router.scaling_factor, router.correction_bias) == (
        GroupedTopK(8, 4, scores_per_group=2),
        2.5,
        True,
    )
    assert weight_bytes(large, build_shard(large, ParallelLayout(), 0), 2, "cuda").loaded / 2e9 == pytest.approx(
        671, abs=0.5
    )
    assert re.fullmatch(weights.ignored[-1], "model.layers.61.eh_proj.weight")  # part of the MTP layer
    cache = plan_cache(large.kv_groups, large.kv_groups, KVCacheFormat(2), 64, 0, max_model_len=4096, max_chunk=2048)
    assert cache.block_bytes == 61 * 64 * 576 * 2  # instead of 61 * 64 * 2 * 128 heads * 128 * 2

    stored = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    quantised = read_model({**json.loads(DEEPSEEK_V3), "quantization_config": stored})[0]
    held = weight_bytes(quantised, build_shard(quantised, ParallelLayout(), 0), 2, "cpu").held
    assert held / 671e9 == pytest.approx(1.036, abs=0.002)  # bytes per parameter: scales, and 16-bit tensors


@pytest.mark.parametrize(
    ("text", "layer", "parameters"),
    [(DEEPSEEK_V3, 61, 11.5), (GLM_4_5_AIR, 46, 2.4)],  # billions, without embedding and LM head
)
def test_layers_for_further_tokens(text: str, layer: int, parameters: float) -> None:
    """DeepSeek-V3's README_WEIGHTS.md counts 11.5 billion parameters in the MTP layer itself."""
    mtp = read_mtp(json.loads(text))
    assert mtp.layer == layer and isinstance(mtp.model.layers[layer].ffn, MoESpec)
    sources = mtp.weights.expand(layer + 1)
    for module in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "input_layernorm", "mlp.experts.7.down_proj"):
        assert f"model.layers.{layer}.{module}.weight" in sources
    count = weight_bytes(mtp.draft, build_shard(mtp.draft, ParallelLayout(), 0), 2, "cuda").loaded / 2
    width = mtp.model.hidden_size
    count += 2 * width * width - 2 * mtp.model.vocab_size * width
    assert count / 1e9 == pytest.approx(parameters, abs=0.15)


@pytest.mark.parametrize(
    ("text", "change", "message"),
    [
        (DEEPSEEK_V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is not supported"),
        (DEEPSEEK_V2_LITE, {"attention_bias": True}, "attention_bias without q_lora_rank"),
        (DEEPSEEK_V2_LITE, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (DEEPSEEK_V3, {"n_group": 7}, "n_group 7 and topk_group 4 do not fit 256 experts"),
        (DEEPSEEK_V3, {"topk_group": 9}, "n_group 8 and topk_group 9 do not fit"),
        (DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq other than 1"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        (DEEPSEEK_V3, {"qk_rope_head_dim": 63}, "even head size"),
    ],
)
def test_what_deepseek_files_may_not_say(text: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model(json.loads(text) | change)


def test_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights = read_model(json.loads(GPT_OSS_20B))
    windowed, whole = spec.kv_groups
    assert (windowed.sliding_window, windowed.layers[:2], whole.sliding_window, len(whole.layers)) == (
        128,
        (0, 2),
        None,
        12,
    )
    assert all(layer.attention.sinks for layer in spec.layers)
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, MoESpec)
    assert ffn.router == RouterSpec(32, 4, bias=True) and ffn.expert == MLPSpec(
        2880, "swigluoai", gated=True, bias=True
    )
    shard = build_shard(spec, ParallelLayout(), 0)
    in_bfloat16 = replace(spec, grouped=None)  # as on a GPU
    assert weight_bytes(in_bfloat16, shard, 2, "cuda").loaded / 2e9 == pytest.approx(20.9, abs=0.05)
    monkeypatch.setattr("serve_llm.cli.plan.parameters.compresses_bfloat16", lambda: False)
    assert weight_bytes(spec, shard, 2, "cpu").held / 1e9 == pytest.approx(
        13.775, abs=0.002
    )  # about the size of its files
    scales = weights.expand(24)["model.layers.23.mlp.experts.down_proj_blocks"].scales
    assert scales == "model.layers.23.mlp.experts.down_proj_scales"
    for change, message in (
        ({"swiglu_limit": 5.0}, "swiglu_limit other than 7.0"),
        ({"rope_scaling": None}, "rope_scaling is missing"),
        ({"quantization_config": {"quant_method": "fp6"}}, "quant_method 'fp6' is not supported"),
        ({"quantization_config": {"quant_method": "mxfp4", "more": 1}}, "quantization_config: unknown keys.*: more"),
    ):
        with pytest.raises(ModelError, match=message):
            read_model(json.loads(GPT_OSS_20B) | change)
    more = {"quantization_config": {"quant_method": "mxfp4", "more": 1}}
    assert read_model(json.loads(GPT_OSS_20B) | more, ["quantization_config.more"])[0] == spec


def test_windows_of_gpt_oss_give_blocks_back() -> None:
    """A request of 32768 tokens takes about half of what it would if all layers kept all tokens."""
    spec = read_model(json.loads(GPT_OSS_20B))[0]
    layers = tuple(replace(layer, attention=replace(layer.attention, sliding_window=None)) for layer in spec.layers)
    num_bytes = []
    for groups in (spec.kv_groups, replace(spec, layers=layers).kv_groups):
        kv_cache_config = plan_cache(groups, groups, KVCacheFormat(2), 16, 0, max_model_len=32768, max_chunk=2048)
        num_bytes.append(kv_cache_config.block_bytes * kv_cache_config.blocks_per_request(32768, 2048))
    assert num_bytes[0] < 0.6 * num_bytes[1]
