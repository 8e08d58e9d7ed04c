"""Qwen2 and Qwen2.5 (Qwen2ForCausalLM): Llama with biases on q, k and v, and a window on some layers."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder, read_windows
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Qwen2Config)."""
    spec = read_decoder(
        config,
        "Qwen2ForCausalLM",
        default_kv_heads=32,
        default_max_position=32768,
        windows=read_windows(config),
        qkv_bias=True,
    )
    config.done()
    return spec, weights(spec)
