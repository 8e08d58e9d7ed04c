"""StableLM (StableLmForCausalLM): Llama with layer norms, rope in a part of each head, and parallel attention
and feed-forward if use_parallel_residual is set; StableLM 2 12B has layer norms per head."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention, read_decoder
from serve_llm.engine.model.families.names import ATTENTION, GATED, PRE_NORMS, weights
from serve_llm.engine.model.spec import ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

HEAD_NORMS = {
    f"self_attn.{name}_layernorm.norms.{{member}}": f"attention.{name}_norm.{{member}}" for name in ("q", "k")
}


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (StableLmConfig)."""
    parallel = config.flag("use_parallel_residual", False)
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5))
    spec = read_decoder(
        config,
        "StableLmForCausalLM",
        default_kv_heads=32,
        default_max_position=4096,
        partial_rotary=0.25,
        windows=[None] * config.layers("num_hidden_layers"),
        norm=norm,
        qkv_bias=config.flag("use_qkv_bias", False),
        norm_position="parallel" if parallel else "pre",
    )
    names = ATTENTION | GATED | ({"input_layernorm": "attention_norm"} if parallel else PRE_NORMS)
    if config.flag("qk_layernorm", False):
        qk_norm = replace(norm, bias=False)
        spec = map_attention(spec, lambda index, attention: replace(attention, qk_norm=qk_norm))
        names |= HEAD_NORMS
    config.ignore("hidden_dropout")
    config.done()
    return spec, weights(spec, names)
