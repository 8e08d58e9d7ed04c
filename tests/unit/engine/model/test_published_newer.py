"""config.json of Gemma 1, OLMo 3 and Seed-OSS is understood."""

from __future__ import annotations

import json

from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.rope_spec import RopeSpec, YarnScaling
from serve_llm.engine.model.spec import AttentionSpec, MLPSpec

GEMMA_2B = """{"architectures": ["GemmaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu", "hidden_size": 2048,
"initializer_range": 0.02, "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
"num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "pad_token_id": 0,
"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
"transformers_version": "4.38.0.dev0", "use_cache": true, "vocab_size": 256000}"""
OLMO3_7B = """{"architectures": ["Olmo3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
"intermediate_size": 11008, "max_position_embeddings": 65536, "model_type": "olmo3", "num_attention_heads": 32,
"num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling":
{"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
"original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000, "sliding_window": 4096,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.57.0", "use_cache": false,
"vocab_size": 100278}"""

SEED_OSS_36B = """{"architectures": ["SeedOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.1,
"attention_out_bias": false, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
"hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648, "max_position_embeddings": 524288,
"mlp_bias": false, "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64,
"num_key_value_heads": 8, "pad_token_id": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling":
{"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
"transformers_version": "4.55.0", "use_cache": true, "vocab_size": 155136}"""


def test_gemma() -> None:
    """ "gelu" means the approximation by tanh, which newer files name."""
    published = json.loads(GEMMA_2B)
    spec = read_model(published)[0]
    (group,) = spec.kv_groups
    assert (group.num_kv_heads, group.head_dim, group.sliding_window, spec.max_position) == (1, 256, None, 8192)
    assert spec.tie_word_embeddings
    assert spec.layers[0].ffn == MLPSpec(16384, "gelu_tanh", gated=True)
    for newer in ({"hidden_activation": "gelu_pytorch_tanh"}, {"hidden_act": "gelu_pytorch_tanh"}):
        assert read_model(published | newer)[0] == spec


def test_rope_of_olmo_3_is_scaled_in_layers_without_a_window() -> None:
    spec = read_model(json.loads(OLMO3_7B))[0]
    local, whole = spec.kv_groups
    assert whole.layers == tuple(range(3, 32, 4))
    assert (local.sliding_window, whole.sliding_window, spec.max_position) == (4096, None, 65536)
    ropes = [layer.attention.rope for layer in spec.layers]
    assert ropes[:3] == [RopeSpec(500000.0)] * 3
    assert ropes[3] is not None and ropes[3].base == 500000.0
    assert isinstance(ropes[3].scaling, YarnScaling) and ropes[3].scaling.factor == 8.0


def test_seed_oss() -> None:
    spec = read_model(json.loads(SEED_OSS_36B))[0]
    attention = spec.layers[63].attention
    assert isinstance(attention, AttentionSpec)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (80, 8, 128)
    assert (attention.qkv_bias, attention.output_bias, attention.rope) == (True, False, RopeSpec(10_000_000.0))
    assert spec.max_position == 524288
