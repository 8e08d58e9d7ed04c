"""Mistral (MistralForCausalLM): Llama with one sliding window for all layers."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (MistralConfig): also the window, which null switches off."""
    window = None if config.is_null("sliding_window") else config.integer("sliding_window", 4096)
    spec = read_decoder(
        config,
        "MistralForCausalLM",
        default_kv_heads=8,
        default_max_position=131072,
        windows=[window] * config.layers("num_hidden_layers"),
    )
    config.done()
    return spec, weights(spec)
