"""Llama (LlamaForCausalLM)."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (LlamaConfig)."""
    spec = read_plain(config, "LlamaForCausalLM")
    config.ignore("max_sequence_length")  # in early conversions; transformers does not read it
    config.only("activation", "swiglu", None)  # in Falcon 3
    config.done()
    return spec, weights(spec)


def read_plain(config: ConfigReader, architecture: str) -> ModelSpec:
    """Read a decoder with Llama's keys and defaults. The caller must call config.done()."""
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config,
        architecture,
        default_kv_heads=None,
        default_max_position=2048,
        windows=[None] * config.layers("num_hidden_layers"),
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=config.flag("mlp_bias", False),
    )
