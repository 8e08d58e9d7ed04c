"""Llama 4 (Llama4ForCausalLM): rope and attention within chunks in three of four layers, query temperatures in the
others, experts whose input is the token multiplied by the router's score, and a shared expert."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention, read_decoder
from serve_llm.engine.model.families.experts import (
    IN_TRAINING,
    holds_stacks,
    read_router,
    transposed_stacks,
    with_experts,
)
from serve_llm.engine.model.families.names import ATTENTION, PRE_NORMS, weights
from serve_llm.engine.model.families.smollm3 import read_rope_layers
from serve_llm.engine.model.rope_spec import Llama3Scaling
from serve_llm.engine.model.spec import AttentionSpec, MLPSpec, ModelSpec, NormSpec, QueryTemperature
from serve_llm.engine.model.weight_map import WeightMap

NAMES = {
    **PRE_NORMS,
    **ATTENTION,
    "feed_forward.router": "ffn.router",
    **{f"feed_forward.{name}_proj": f"ffn.{name}" for name in ("gate", "up", "down")},  # in layers without experts
    **{f"feed_forward.shared_expert.{name}_proj": f"ffn.shared.{name}" for name in ("gate", "up", "down")},
}
EXPERTS = {  # as modules, see `holds_stacks`
    f"feed_forward.experts.{{member}}.{name}_proj": f"ffn.experts.{{member}}.{name}" for name in ("gate", "up", "down")
}


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Llama4TextConfig)."""
    config.set_defaults(attn_temperature_tuning=True)
    num_layers = config.layers("num_hidden_layers")
    bias = config.flag("attention_bias", False)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    config.choice("hidden_act", {"silu": "silu", "swish": "silu"}, "silu")
    dense = read_decoder(
        config,
        "Llama4ForCausalLM",
        default_kv_heads=8,
        default_max_position=131072,
        default_head_dim=128,
        default_rope_base=500_000.0,
        windows=[None] * num_layers,
        interleaved=True,
        norm=norm,
        ffn=MLPSpec(config.integer("intermediate_size_mlp", 16384), "silu", gated=True),
        qkv_bias=bias,
        output_bias=bias,
    )
    width = config.integer("intermediate_size", 8192)
    router = read_router(config, config.integer("num_local_experts", 16, highest=10_000), 1, normalise=False)
    if router.top_k != 1:
        raise ModelError(f"config.json: num_experts_per_tok other than 1 is not supported, but it is {router.top_k}")
    router = replace(router, scoring="sigmoid", scales_inputs=True)
    sparse = _read_sparse_layers(config, num_layers)
    spec = with_experts(_read_attention(config, dense), router, width, width, where=sparse.__contains__)
    config.ignore(*IN_TRAINING, "for_llm_compressor")
    is_stacked = holds_stacks(config)
    config.done()
    if not is_stacked:
        return spec, weights(spec, NAMES | EXPERTS)
    named = weights(spec, NAMES)
    stacks = transposed_stacks(spec, "model.layers.{layer}.feed_forward.experts")
    return spec, replace(named, rules=(*named.rules, *stacks))


def _read_attention(config: ConfigReader, spec: ModelSpec) -> ModelSpec:
    num_layers = len(spec.layers)
    has_rope = read_rope_layers(config, num_layers)
    kinds = config.names("layer_types")
    if kinds is None:
        kinds = tuple("chunked_attention" if rope else "full_attention" for rope in has_rope)
    if len(kinds) != num_layers or not set(kinds) <= {"chunked_attention", "full_attention"}:
        raise ModelError(
            "config.json: layer_types must name full_attention or chunked_attention for each of the "
            f"{num_layers} layers, but it is {', '.join(kinds)}"
        )
    chunk = config.integer("attention_chunk_size", 8192)
    if config.is_null("attention_chunk_size") and "chunked_attention" in kinds:
        raise ModelError("config.json: attention_chunk_size is null, but some layers attend within chunks")
    tuning = QueryTemperature(config.number("attn_scale", 0.1), config.integer("floor_scale", 8192))
    temperature = tuning if config.flag_or("attn_temperature_tuning", 4) else None
    # Rotation does not change a vector's norm, so the norm may come first.
    head_norm = replace(spec.layers[0].norm, affine=False) if config.flag("use_qk_norm", True) else None

    def change(index: int, attention: AttentionSpec) -> AttentionSpec:
        if kinds[index] == "chunked_attention":
            attention = replace(attention, sliding_window=chunk, chunked=True)
        if has_rope[index]:
            return replace(attention, qk_norm=head_norm)
        return replace(attention, rope=None, query_temperature=temperature)

    rope = spec.layers[0].attention.rope
    if rope is not None and rope.scaling is not None and not isinstance(rope.scaling, Llama3Scaling):
        raise ModelError("config.json: rope_type other than default and llama3 is not supported in Llama 4")
    return map_attention(spec, change)


def _read_sparse_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """The layers with experts."""
    step = config.integer("interleave_moe_layer_step", 1)
    listed = config.integers("moe_layers", highest=num_layers - 1)
    return tuple(range(step - 1, num_layers, step)) if listed is None else listed
