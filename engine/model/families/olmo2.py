"""OLMo 2 (Olmo2ForCausalLM): Llama with norms after attention and feed-forward, and norms over the whole query and key
projections."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention, read_decoder
from serve_llm.engine.model.families.names import ATTENTION, GATED, weights
from serve_llm.engine.model.spec import ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Olmo2Config)."""
    bias = config.flag("attention_bias", False)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    plain = read_decoder(
        config,
        "Olmo2ForCausalLM",
        default_kv_heads=None,
        default_max_position=2048,
        norm_position="output",
        norm=norm,
        windows=[None] * config.layers("num_hidden_layers"),
        qkv_bias=bias,
        output_bias=bias,
    )
    spec = map_attention(plain, lambda index, attention: replace(attention, qk_projection_norm=norm))
    config.done()
    norms = {"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "ffn_norm"}
    return spec, weights(spec, norms | ATTENTION | GATED)
