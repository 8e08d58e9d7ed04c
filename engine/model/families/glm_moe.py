"""GLM-4.5 and 4.6 (Glm4MoeForCausalLM): rope in a part of each head, and experts as in DeepSeek-V3."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.names import ATTENTION, GATED, PRE_NORMS
from serve_llm.engine.model.families.routed_experts import read_routed_experts, read_sigmoid_router
from serve_llm.engine.model.spec import ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Glm4MoeConfig)."""
    dense = read_decoder(
        config,
        "Glm4MoeForCausalLM",
        default_kv_heads=8,
        default_max_position=131072,
        partial_rotary=0.5,
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
        windows=[None] * config.layers("num_hidden_layers"),
        qkv_bias=config.flag("attention_bias", False),
        head_norm=config.flag("use_qk_norm", False),
    )
    router = read_sigmoid_router(config, num_experts=128, scaling_factor=1.0, groups=(1, 1))
    names = PRE_NORMS | ATTENTION | GATED
    return read_routed_experts(config, dense, router, names, default_dense=1, default_width=1408, default_shared=1)
