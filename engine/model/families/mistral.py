"""Mistral (MistralForCausalLM): Llama with one sliding window for all layers.

Ministral 3 (Ministral3ForCausalLM) also scales queries by their position."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention, read_decoder
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import ModelSpec, NormSpec, QueryTemperature
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (MistralConfig), including the window, which null switches off."""
    window = None if config.is_null("sliding_window") else config.integer("sliding_window", 4096)
    spec = read_decoder(
        config,
        "MistralForCausalLM",
        default_kv_heads=8,
        default_max_position=131072,
        windows=[window] * config.layers("num_hidden_layers"),
    )
    config.ignore("max_sequence_length")  # in models with YaRN; transformers does not read it
    config.done()
    return spec, weights(spec)


MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_ministral3(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Ministral3Config)."""
    config.set_defaults(rope_parameters=MINISTRAL3_ROPE)
    scaling = config.inner("rope_scaling") or config.require("rope_parameters")
    scaling.ignore("max_position_embeddings")
    beta = scaling.number("llama_4_scaling_beta", 0.0)
    interval = scaling.integer("original_max_position_embeddings") if beta else 0
    window = config.integer("sliding_window", 0) or None
    spec = read_decoder(
        config,
        "Ministral3ForCausalLM",
        default_kv_heads=8,
        default_max_position=262144,
        default_head_dim=128,
        windows=[window] * config.layers("num_hidden_layers"),
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-5)),
    )
    if beta:
        temperature = QueryTemperature(beta, interval, first=0)
        spec = map_attention(spec, lambda index, attention: replace(attention, query_temperature=temperature))
    config.done()
    return spec, weights(spec)
