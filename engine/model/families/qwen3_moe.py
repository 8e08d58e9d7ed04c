"""Qwen3-MoE (Qwen3MoeForCausalLM): Qwen3 with experts, and one window for all layers if any."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.families.qwen2 import limit_dual_chunk_context
from serve_llm.engine.model.families.qwen2_moe import NAMES, read_experts
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Qwen3MoeConfig)."""
    bias = config.flag("attention_bias", False)
    sliding = config.flag("use_sliding_window", False)
    window = config.integer("sliding_window", 4096)
    dense = read_decoder(
        config,
        "Qwen3MoeForCausalLM",
        default_kv_heads=4,
        default_max_position=32768,
        windows=[window if sliding else None] * config.layers("num_hidden_layers"),
        qkv_bias=bias,
        output_bias=bias,
        head_norm=True,
    )
    dense = limit_dual_chunk_context(config, dense)
    # in published files; transformers does not read them
    config.ignore("max_window_layers", "qkv_bias", "use_qk_norm", "shared_expert_intermediate_size")
    # num_experts in published files, num_local_experts as transformers 5 writes it
    num_experts = config.integer("num_experts", config.integer("num_local_experts", 128), highest=10_000)
    spec = read_experts(config, dense, num_experts, default_top_k=8, default_width=768)
    return spec, weights(spec, NAMES)
