"""Seed-OSS (SeedOssForCausalLM): Llama with biases of queries, keys and values, and a flag for that of the attention's
output."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (SeedOssConfig)."""
    spec = read_decoder(
        config,
        "SeedOssForCausalLM",
        default_kv_heads=8,
        default_max_position=524288,
        default_head_dim=None if config.is_null("head_dim") else 128,
        windows=[None] * config.layers("num_hidden_layers"),
        qkv_bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias", False),
        ffn_bias=config.flag("mlp_bias", False),
    )
    config.done()
    return spec, weights(spec)
