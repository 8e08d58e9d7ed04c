"""config.json of well-known published checkpoints, with the odd keys that old and derived ones carry, is understood."""

from __future__ import annotations

import json

import pytest

from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.spec import Llama3Scaling

GPT2_MEDIUM = """{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
"layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1024, "n_head": 16, "n_layer": 24,
"n_positions": 1024, "n_special": 0, "predict_special_tokens": true, "resid_pdrop": 0.1, "summary_activation": null,
"summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
"task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257}"""
OPT_350M = """{"_name_or_path": "opt-350m", "_remove_final_layer_norm": false, "activation_dropout": 0.0,
"activation_function": "relu", "architectures": ["OPTForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 2,
"do_layer_norm_before": false, "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 4096, "hidden_size": 1024,
"init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048, "model_type": "opt", "num_attention_heads": 16,
"num_hidden_layers": 24, "pad_token_id": 1, "prefix": "</s>", "torch_dtype": "float16",
"transformers_version": "4.20.0.dev0", "use_cache": true, "vocab_size": 50272, "word_embed_proj_dim": 512}"""
LLAMA_32_1B = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
"mlp_bias": false, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
"num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
"high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
"rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0",
"use_cache": true, "vocab_size": 128256}"""
SMOLLM2 = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041,
"intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
"model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
"pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
"rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": true, "vocab_size": 49152}"""
MISTRAL_7B = """{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
"hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
"model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
"torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}"""
DISTILL_QWEN = """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
"eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
"intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21, "model_type": "qwen2",
"num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
"rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
"transformers_version": "4.44.0", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
"vocab_size": 151936}"""
STARCODER2_15B = """{"architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 0,
"eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 6144, "initializer_range": 0.01275,
"intermediate_size": 24576, "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2",
"norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 48, "num_hidden_layers": 40,
"num_key_value_heads": 4, "rms_norm_eps": 1e-05, "rope_theta": 100000, "sliding_window": 4096,
"tie_word_embeddings": false, "torch_dtype": "float32", "transformers_version": "4.37.0.dev0", "use_bias": true,
"use_cache": true, "vocab_size": 49152}"""
QWEN3_06B = """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
"initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
"model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
"use_sliding_window": false, "vocab_size": 151936}"""
NEMOTRON_MINI_4B = """{"architectures": ["NemotronForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 2, "eos_token_id": 3, "head_dim": 128, "hidden_act": "relu2", "hidden_size": 3072,
"initializer_range": 0.0134, "intermediate_size": 9216, "max_position_embeddings": 4096, "mlp_bias": false,
"model_type": "nemotron", "norm_eps": 1e-05, "num_attention_heads": 24, "num_hidden_layers": 32,
"num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rope_theta": 10000, "tie_word_embeddings": false,
"torch_dtype": "bfloat16", "transformers_version": "4.32.0.dev0", "use_cache": true, "vocab_size": 256000}"""
GLM_4_9B = """{"architectures": ["Glm4ForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
"eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
"initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768, "model_type": "glm4",
"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": false,
"torch_dtype": "bfloat16", "transformers_version": "4.52.0.dev0", "use_cache": true, "vocab_size": 151552}"""

PHI4_MINI = """{"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu",
"hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1,
"lm_head_bias": false, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "phi3",
"num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
"original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0,
"rms_norm_eps": 1e-05, "rope_scaling": {"long_factor": [FACTORS], "short_factor": [FACTORS], "type": "longrope"},
"rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
"transformers_version": "4.45.0", "use_cache": true, "vocab_size": 200064}""".replace(
    "FACTORS", ", ".join(["1.5"] * 48)
)


@pytest.mark.parametrize(
    ("text", "num_layers", "kv_heads", "head_dim", "window", "context", "tied"),
    [
        (GPT2_MEDIUM, 24, 16, 64, None, 1024, True),
        (OPT_350M, 24, 16, 64, None, 2048, True),
        (LLAMA_32_1B, 16, 8, 64, None, 131072, True),
        (SMOLLM2, 30, 3, 64, None, 8192, True),
        (MISTRAL_7B, 32, 8, 128, 4096, 32768, False),
        (DISTILL_QWEN, 28, 2, 128, None, 131072, False),
        (PHI4_MINI, 32, 8, 128, 262144, 131072, True),
        (STARCODER2_15B, 40, 4, 128, 4096, 16384, False),
        (QWEN3_06B, 28, 8, 128, None, 40960, True),
        (NEMOTRON_MINI_4B, 32, 8, 128, None, 4096, False),
        (GLM_4_9B, 40, 2, 128, None, 32768, False),
    ],
)
def test_understood(
    text: str, num_layers: int, kv_heads: int, head_dim: int, window: int | None, context: int, tied: bool
) -> None:
    spec, _ = read_model(json.loads(text))
    (group,) = spec.kv_groups
    assert group.layers == tuple(range(num_layers))
    assert (group.kv_heads, group.head_dim, group.window) == (kv_heads, head_dim, window)
    assert (spec.max_position, spec.tied_head) == (context, tied)


def test_details() -> None:
    opt = read_model(json.loads(OPT_350M))[0]
    assert (opt.embedding_width, opt.layers[0].placement, opt.final_norm) == (512, "post", None)
    rope = read_model(json.loads(LLAMA_32_1B))[0].layers[0].mixer.rope
    assert rope is not None and rope.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
