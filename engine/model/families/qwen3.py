"""Qwen3 (Qwen3ForCausalLM): Llama with a norm on every query and key head, and a window on some layers."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder, read_windows
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Qwen3Config)."""
    bias = config.flag("attention_bias", False)
    spec = read_decoder(
        config,
        "Qwen3ForCausalLM",
        default_kv_heads=32,
        default_max_position=32768,
        default_head_dim=128,
        windows=read_windows(config),
        qkv_bias=bias,
        output_bias=bias,
        head_norm=True,
    )
    config.done()
    return spec, weights(spec)
