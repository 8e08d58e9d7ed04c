"""config.json of published checkpoints, reduced to the keys that determine sizes."""

from __future__ import annotations


def llama(
    width: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 128256, **more: object
) -> dict[str, object]:
    """Return config.json of the Llama family, in bfloat16."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    } | more


LLAMA_1B = llama(2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True)
LLAMA_8B = llama(4096, 14336, 32, 32, 8)
LLAMA_70B = llama(8192, 28672, 80, 64, 8)
LLAMA_405B = llama(16384, 53248, 126, 128, 8)
LLAMA2_13B = llama(5120, 13824, 40, 40, 40, 32000, max_position_embeddings=4096)
MISTRAL_7B = llama(4096, 14336, 32, 32, 8, 32000, architectures=["MistralForCausalLM"], sliding_window=4096) | {
    "max_position_embeddings": 32768
}
QWEN2_7B = llama(3584, 18944, 28, 28, 4, 152064, architectures=["Qwen2ForCausalLM"]) | {
    "max_position_embeddings": 32768
}
QWEN2_HALF_B = llama(896, 4864, 24, 14, 2, 151936, architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True) | {
    "max_position_embeddings": 32768
}
QWEN3_32B = llama(5120, 25600, 64, 64, 8, 151936, architectures=["Qwen3ForCausalLM"], head_dim=128) | {
    "max_position_embeddings": 40960
}
GEMMA3_1B = llama(1152, 6912, 26, 4, 1, 262144, architectures=["Gemma3ForCausalLM"], head_dim=256) | {
    "max_position_embeddings": 32768,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
}
GPT2_XL: dict[str, object] = {
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 1600,
    "n_head": 25,
    "n_layer": 48,
    "n_positions": 1024,
    "vocab_size": 50257,
}
OPT_30B: dict[str, object] = {
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 7168,
    "ffn_dim": 28672,
    "num_hidden_layers": 48,
    "num_attention_heads": 56,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 7168,
    "torch_dtype": "float16",
}
MIXTRAL_8X7B = llama(4096, 14336, 32, 32, 8, 32000, architectures=["MixtralForCausalLM"], num_local_experts=8) | {
    "num_experts_per_tok": 2
}
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151552,
}
