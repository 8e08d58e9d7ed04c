"""OLMo 2 (Olmo2ForCausalLM): Llama with norms of what each half makes, and of whole query and key projections."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.model.config import Config
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.names import ATTENTION, GATED, weights
from serve_llm.engine.model.spec import ModelSpec, Norm
from serve_llm.engine.model.weight_map import WeightMap


def read(config: Config) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Olmo2Config)."""
    bias = config.flag("attention_bias", False)
    plain = read_decoder(
        config,
        "Olmo2ForCausalLM",
        default_kv_heads=None,
        default_max_position=2048,
        norm=Norm("rms", config.number("rms_norm_eps", 1e-5)),
        windows=[None] * config.layers("num_hidden_layers"),
        qkv_bias=bias,
        output_bias=bias,
    )
    layer = plain.layers[0]
    mixer = replace(layer.attention, projection_norm_eps=layer.norm.eps)
    spec = replace(plain, layers=(replace(layer, mixer=mixer, placement="inside"),) * len(plain.layers))
    config.done()
    norms = {"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "ffn_norm"}
    return spec, weights(spec, norms | ATTENTION | GATED)
