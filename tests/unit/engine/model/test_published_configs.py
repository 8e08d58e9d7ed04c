"""config.json of well-known checkpoints is understood, with the unusual keys of old and derived ones."""

from __future__ import annotations

import json

import pytest

from serve_llm.cli.plan.weights import weight_bytes
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.rope_spec import Llama3Scaling, RopeSpec
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.model.spec import AttentionSpec, MoESpec, QueryTemperature, RouterSpec
from serve_llm.engine.parallel.layout import ParallelLayout

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
LLAMA_4_SCOUT = """{"architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080,
"eoi_token_index": 200081, "image_token_index": 200092, "model_type": "llama4", "text_config":
{"_attn_implementation_autoset": true, "attention_bias": false, "attention_chunk_size": 8192,
"attention_dropout": 0.0, "attn_scale": 0.1, "attn_temperature_tuning": 4, "bos_token_id": 200000,
"eos_token_id": [200001, 200007, 200008], "floor_scale": 8192, "for_llm_compressor": false, "head_dim": 128,
"hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02, "interleave_moe_layer_step": 1,
"intermediate_size": 8192, "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760,
"model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1,
"num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "output_router_logits": false,
"pad_token_id": 200018, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0,
"low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
"router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16", "use_cache": true,
"use_qk_norm": true, "vocab_size": 202048}, "torch_dtype": "bfloat16", "transformers_version": "4.51.0.dev0",
"vision_config": {"model_type": "llama4_vision_model"}}"""
QWEN_7B = """{"architectures": ["QWenLMHeadModel"], "attn_dropout_prob": 0.0, "auto_map": {"AutoConfig":
"configuration_qwen.QWenConfig", "AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"}, "bf16": false,
"emb_dropout_prob": 0.0, "fp16": false, "fp32": false, "hidden_size": 4096, "intermediate_size": 22016,
"initializer_range": 0.02, "kv_channels": 128, "layer_norm_epsilon": 1e-06, "max_position_embeddings": 32768,
"model_type": "qwen", "no_bias": true, "num_attention_heads": 32, "num_hidden_layers": 32, "onnx_safe": null,
"rotary_emb_base": 10000, "rotary_pct": 1.0, "scale_attn_weights": true, "seq_length": 8192,
"tie_word_embeddings": false, "tokenizer_class": "QWenTokenizer", "transformers_version": "4.32.0",
"use_cache": true, "use_dynamic_ntk": true, "use_flash_attn": "auto", "use_logn_attn": true, "vocab_size": 151936}"""
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
COMMAND_R = """{"architectures": ["CohereForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 5, "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 8192, "initializer_range": 0.02,
"intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192,
"model_max_length": 131072, "model_type": "cohere", "num_attention_heads": 64, "num_hidden_layers": 40,
"num_key_value_heads": 64, "pad_token_id": 0, "pretraining_tp": 1, "rope_theta": 8000000.0, "torch_dtype": "float16",
"transformers_version": "4.38.2", "use_cache": true, "vocab_size": 256000}"""
COMMAND_R7B = """{"architectures": ["Cohere2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128, "hidden_act": "silu",
"hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_eps": 1e-05,
"layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192, "model_type": "cohere2",
"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
"order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0, "position_embedding_type": "rope_gptj",
"rope_scaling": null, "rope_theta": 50000, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
"torch_dtype": "bfloat16", "transformers_version": "4.48.0.dev0", "use_cache": true, "use_embedding_sharing": true,
"use_gated_activation": true, "use_parallel_block": true, "use_parallel_embedding": true, "vocab_size": 256000}"""
GEMMA_2_2B = """{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
"final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
"max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26,
"num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
"rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.42.4",
"use_cache": true, "vocab_size": 256000}"""
GEMMA_3_1B = """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
"final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
"initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
"num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
"query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
"rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
"transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144}"""

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
MIXTRAL_8X7B = """{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
"eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
"max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
"num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": true,
"vocab_size": 32000}"""
QWEN15_MOE = """{"architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
"eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
"intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe",
"num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06,
"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
"transformers_version": "4.39.0.dev0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936,
"decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
"num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": false, "output_router_logits": false,
"router_aux_loss_coef": 0.001}"""
QWEN3_30B_A3B = """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
"max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
"norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
"num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
"rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
"use_sliding_window": false, "vocab_size": 151936}"""
GRANITE_1B_A400M = """{"architectures": ["GraniteMoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.1,
"attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
"hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 512, "logits_scaling": 6.0,
"max_position_embeddings": 4096, "model_type": "granitemoe", "num_attention_heads": 16, "num_experts_per_tok": 8,
"num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false,
"pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000,
"router_aux_loss_coef": 0.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
"transformers_version": "4.46.0.dev0", "use_cache": true, "vocab_size": 49155}"""

PYTHIA_1B = """{"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "layer_norm_eps": 1e-05,
"max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 16,
"rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false, "torch_dtype": "float16",
"transformers_version": "4.24.0", "use_cache": true, "use_parallel_residual": true, "vocab_size": 50304}"""
GPT_J_6B = """{"activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
"bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": false,
"initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head": 16,
"n_inner": null, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": true, "rotary_dim": 64,
"scale_attn_weights": true, "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
"summary_type": "cls_index", "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true,
"max_length": 50, "temperature": 1.0}}, "tie_word_embeddings": false, "tokenizer_class": "GPT2Tokenizer",
"transformers_version": "4.18.0.dev0", "use_cache": true, "vocab_size": 50400}"""
FALCON_7B = """{"alibi": false, "apply_residual_connection_post_layernorm": false,
"architectures": ["FalconForCausalLM"], "attention_dropout": 0.0, "auto_map": {"AutoConfig": "x"}, "bias": false,
"bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544, "initializer_range": 0.02,
"layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": true, "new_decoder_architecture": false,
"num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": true, "torch_dtype": "bfloat16",
"transformers_version": "4.27.4", "use_cache": true, "vocab_size": 65024}"""
FALCON_40B = """{"alibi": false, "apply_residual_connection_post_layernorm": false,
"architectures": ["FalconForCausalLM"], "attention_dropout": 0.0, "bias": false, "bos_token_id": 11,
"eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 8192, "initializer_range": 0.02,
"layer_norm_epsilon": 1e-05, "model_type": "falcon", "new_decoder_architecture": true, "num_attention_heads": 128,
"num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": true, "torch_dtype": "bfloat16",
"transformers_version": "4.27.4", "use_cache": true, "vocab_size": 65024}"""
FALCON2_11B = """{"activation": "gelu", "alibi": false, "architectures": ["FalconForCausalLM"],
"attention_dropout": 0.0, "bias": false, "bos_token_id": 11, "eos_token_id": 11, "ff_factor": 4,
"ffn_hidden_size": 16384, "hidden_dropout": 0.0, "hidden_size": 4096, "initializer_range": 0.02,
"layer_norm_epsilon": 1e-05, "max_position_embeddings": 8192, "model_type": "falcon", "multi_query": true,
"new_decoder_architecture": true, "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8,
"num_ln_in_parallel_attn": 1, "parallel_attn": true, "rope_scaling": null, "rope_theta": 500042.0,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.39.2", "use_cache": true,
"vocab_size": 65024}"""
GRANITE_31_8B = """{"architectures": ["GraniteForCausalLM"], "attention_bias": false, "attention_dropout": 0.1,
"attention_multiplier": 0.0078125, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12800,
"logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "granite",
"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
"residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000000.0,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.47.0", "use_cache": true,
"vocab_size": 49155}"""
OLMO2_7B = """{"architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
"intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32,
"num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
"rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": false, "torch_dtype": "float32",
"transformers_version": "4.47.0", "use_cache": false, "vocab_size": 100352}"""
SMOLLM3_3B = """{"architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": null, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
"intermediate_size": 11008, "layer_types": [LAYERS], "max_position_embeddings": 65536, "max_window_layers": 28,
"mlp_bias": false, "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [TURNS],
"num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004,
"pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": true,
"use_sliding_window": false, "vocab_size": 128256}""".replace("LAYERS", ", ".join(['"full_attention"'] * 36)).replace(
    "TURNS", ", ".join(["1, 1, 1, 0"] * 9)
)
STABLELM_2_1_6B = """{"architectures": ["StableLmForCausalLM"], "bos_token_id": 100257, "eos_token_id": 100257,
"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
"layer_norm_eps": 1e-05, "max_position_embeddings": 4096, "model_type": "stablelm", "num_attention_heads": 32,
"num_hidden_layers": 24, "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rope_theta": 10000,
"tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.38.0", "use_cache": true,
"use_qkv_bias": true, "vocab_size": 100352}"""


@pytest.mark.parametrize(
    ("text", "num_layers", "kv_heads", "head_dim", "window", "context", "tied"),
    [
        (GPT2_MEDIUM, 24, 16, 64, None, 1024, True),
        (OPT_350M, 24, 16, 64, None, 2048, True),
        (LLAMA_32_1B, 16, 8, 64, None, 131072, True),
        (SMOLLM2, 30, 3, 64, None, 8192, True),
        (MISTRAL_7B, 32, 8, 128, 4096, 32768, False),
        (DISTILL_QWEN, 28, 2, 128, None, 131072, False),
        (QWEN_7B, 32, 32, 128, None, 8192, False),
        (PHI4_MINI, 32, 8, 128, 262144, 131072, True),
        (STARCODER2_15B, 40, 4, 128, 4096, 16384, False),
        (QWEN3_06B, 28, 8, 128, None, 40960, True),
        (PYTHIA_1B, 16, 8, 256, None, 2048, False),
        (GPT_J_6B, 28, 16, 256, None, 2048, False),
        (FALCON_7B, 32, 1, 64, None, 2048, True),
        (FALCON_40B, 60, 8, 64, None, 2048, True),
        (FALCON2_11B, 60, 8, 128, None, 8192, False),
        (GRANITE_31_8B, 40, 8, 128, None, 131072, True),
        (OLMO2_7B, 32, 32, 128, None, 4096, False),
        (SMOLLM3_3B, 36, 4, 128, None, 65536, True),
        (STABLELM_2_1_6B, 24, 32, 64, None, 4096, False),
        (NEMOTRON_MINI_4B, 32, 8, 128, None, 4096, False),
        (GLM_4_9B, 40, 2, 128, None, 32768, False),
        (COMMAND_R, 40, 64, 128, None, 131072, True),
        (MIXTRAL_8X7B, 32, 8, 128, None, 32768, False),
        (QWEN15_MOE, 24, 16, 128, None, 8192, False),
        (QWEN3_30B_A3B, 48, 4, 128, None, 40960, False),
        (GRANITE_1B_A400M, 24, 8, 64, None, 4096, True),
    ],
)
def test_understood(
    text: str, num_layers: int, kv_heads: int, head_dim: int, window: int | None, context: int, tied: bool
) -> None:
    spec, _ = read_model(json.loads(text))
    (group,) = spec.kv_groups
    assert group.layers == tuple(range(num_layers))
    assert (group.num_kv_heads, group.head_dim, group.sliding_window) == (kv_heads, head_dim, window)
    assert (spec.max_position, spec.tie_word_embeddings) == (context, tied)


@pytest.mark.parametrize(
    ("text", "more"),
    [
        (STARCODER2_15B, {"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True}),
        (QWEN3_30B_A3B, {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}),  # Qwen3-Coder
        (NEMOTRON_MINI_4B, {"kv_channels": 128, "layer_norm_eps": 1e-5, "unk_token_id": 0}),
        (COMMAND_R7B, {"use_qk_norm": False, "_sliding_window_pattern": 4}),  # Aya
        (PYTHIA_1B, {"custom_pipelines": {"text-generation": {"impl": "pipeline.Pipeline"}}}),  # h2oGPT
    ],
)
def test_odd_keys(text: str, more: dict[str, object]) -> None:
    """Derived models have more keys, which transformers does not read."""
    assert read_model(json.loads(text) | more) == read_model(json.loads(text))


@pytest.mark.parametrize(
    ("text", "num_layers", "every", "kv_heads", "head_dim", "window", "context"),
    [
        (COMMAND_R7B, 32, 4, 8, 128, 4096, 8192),
        (GEMMA_2_2B, 26, 2, 4, 256, 4096, 8192),
        (GEMMA_3_1B, 26, 6, 1, 256, 512, 32768),
    ],
)
def test_windows_in_all_but_some_layers(
    text: str, num_layers: int, every: int, kv_heads: int, head_dim: int, window: int, context: int
) -> None:
    spec, _ = read_model(json.loads(text))
    local, whole = spec.kv_groups
    assert whole.layers == tuple(range(every - 1, num_layers, every))
    assert sorted((*local.layers, *whole.layers)) == list(range(num_layers))
    assert {(group.num_kv_heads, group.head_dim) for group in spec.kv_groups} == {(kv_heads, head_dim)}
    assert (local.sliding_window, whole.sliding_window, spec.max_position, spec.tie_word_embeddings) == (
        window,
        None,
        context,
        True,
    )


def test_details() -> None:
    opt = read_model(json.loads(OPT_350M))[0]
    assert (opt.embedding_size, opt.layers[0].norm_position, opt.final_norm) == (512, "post", None)
    rope = read_model(json.loads(LLAMA_32_1B))[0].layers[0].attention.rope
    assert rope is not None and rope.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert read_model(json.loads(PYTHIA_1B))[0].layers[0].attention.rope == RopeSpec(10000.0, rotary_dim=64)
    assert read_model(json.loads(GPT_J_6B))[0].layers[0].attention.rope == RopeSpec(
        10000.0, rotary_dim=64, interleaved=True
    )
    falcons = [read_model(json.loads(text))[0].layers[0] for text in (FALCON_7B, FALCON_40B, FALCON2_11B)]
    assert [layer.norm_position for layer in falcons] == ["parallel", "parallel_two_norms", "parallel"]
    assert [layer.ffn.intermediate_size for layer in falcons] == [18176, 32768, 16384]
    local, whole = (read_model(json.loads(GEMMA_3_1B))[0].layers[index].attention for index in (4, 5))
    assert (local.rope, whole.rope) == (RopeSpec(10000.0), RopeSpec(1000000.0))
    gemma = read_model(json.loads(GEMMA_2_2B))[0]
    assert (gemma.layers[0].attention.softcap, gemma.logits_softcap, gemma.embedding_multiplier) == (50.0, 30.0, 48.0)


@pytest.mark.parametrize(
    ("text", "experts", "top_k", "width", "normalise", "shared", "billions"),
    [
        (MIXTRAL_8X7B, 8, 2, 14336, True, None, 46.7),
        (QWEN15_MOE, 60, 4, 1408, False, 5632, 14.3),
        (QWEN3_30B_A3B, 128, 8, 768, True, None, 30.5),
        (GRANITE_1B_A400M, 32, 8, 512, True, None, 1.3),
    ],
)
def test_experts(
    text: str, experts: int, top_k: int, width: int, normalise: bool, shared: int | None, billions: float
) -> None:
    """billions: number of parameters, as their publishers count them."""
    spec = read_model(json.loads(text))[0]
    (ffn,) = {layer.ffn for layer in spec.layers}
    assert isinstance(ffn, MoESpec)
    assert ffn.router == RouterSpec(experts, top_k, renormalise=normalise)
    assert (
        ffn.expert.intermediate_size,
        ffn.shared_expert and ffn.shared_expert.intermediate_size,
        ffn.shared_expert_gate,
    ) == (width, shared, shared is not None)
    loaded = weight_bytes(spec, build_shard(spec, ParallelLayout(), 0), 2, "cuda").loaded
    assert loaded / 2e9 == pytest.approx(billions, abs=0.05)


def test_llama_4() -> None:
    spec = read_model(json.loads(LLAMA_4_SCOUT))[0]
    chunked, whole = spec.kv_groups
    assert whole.layers == tuple(range(3, 48, 4)) and whole.sliding_window is None
    assert (chunked.sliding_window, chunked.chunked, len(chunked.layers)) == (8192, True, 36)
    short = spec.with_max_length(8192)
    assert len(short.kv_groups) == 1
    tuned = [layer.attention for layer in spec.layers if layer.attention.rope is None]
    assert all(isinstance(one, AttentionSpec) and one.query_temperature and not one.qk_norm for one in tuned)
    loaded = weight_bytes(spec, build_shard(spec, ParallelLayout(), 0), 2, "cuda").loaded
    assert loaded / 2e9 == pytest.approx(107.8, abs=0.05)  # 108.6 with the vision tower


MINISTRAL3_8B = """{"architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
"model_type": "mistral3", "multimodal_projector_bias": false, "projector_hidden_act": "gelu", "quantization_config":
{"activation_scheme": "static", "dequantize": false, "modules_to_not_convert": ["model.vision_tower",
"model.multi_modal_projector", "lm_head"], "quant_method": "fp8", "weight_block_size": null}, "spatial_merge_size": 2,
"text_config": {"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
"initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
"num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_parameters":
{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
"original_max_position_embeddings": 16384, "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"},
"sliding_window": null, "use_cache": true, "vocab_size": 131072}, "vision_config": {"model_type": "pixtral"},
"vision_feature_layer": -1}"""


def test_ministral3() -> None:
    spec, weights = read_model(json.loads(MINISTRAL3_8B))
    assert weights.quantized is not None and spec.max_position == 262144
    temperatures = {layer.attention.query_temperature for layer in spec.layers}  # type: ignore[union-attr]
    assert temperatures == {QueryTemperature(0.1, 16384, first=0)}
