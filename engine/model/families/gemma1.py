"""Gemma 1 (GemmaForCausalLM): Llama with gelu gates, scaled embeddings, and norms whose weights are stored minus 1 and
kept in float32."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

TANH = {"gelu_pytorch_tanh": "gelu_pytorch_tanh"}


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (GemmaConfig)."""
    config.refuse("use_bidirectional_attention")
    config.choice("hidden_activation", TANH, "gelu_pytorch_tanh")
    config.choice("hidden_act", TANH | {"gelu": "gelu_pytorch_tanh"}, "gelu")  # published files say "gelu"
    bias = config.flag("attention_bias", False)
    spec = read_decoder(
        config,
        "GemmaForCausalLM",
        default_kv_heads=16,
        default_max_position=8192,
        default_head_dim=256,
        default_tied=True,
        windows=[None] * config.layers("num_hidden_layers"),
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-6), float32_weight=True),
        ffn=MLPSpec(config.integer("intermediate_size"), "gelu_tanh", gated=True),
        qkv_bias=bias,
        output_bias=bias,
    )
    config.done()
    spec = replace(spec, embedding_multiplier=spec.hidden_size**0.5, rounds_embedding_multiplier=True)
    return spec, weights(spec, norms="plus_one")
