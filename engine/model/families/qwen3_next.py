"""Qwen3-Next (Qwen3NextForCausalLM) and the text part of Qwen3.5: gated DeltaNet in most layers, gated attention in the
others, norms whose weights are stored minus 1 and kept in float32, and experts with a gated shared expert."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.families.decoder import map_attention, read_decoder
from serve_llm.engine.model.families.hybrid_names import build_weights
from serve_llm.engine.model.families.qwen2_moe import NAMES, SHARED, read_experts
from serve_llm.engine.model.spec import ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

KINDS = {"linear_attention", "full_attention"}
INPUTS = {"in_proj_qkvz": "q k v z", "in_proj_ba": "beta alpha"}


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Qwen3NextConfig)."""
    config.set_defaults(intermediate_size=5632, norm_topk_prob=True)
    dense = read_hybrid(config, "Qwen3NextForCausalLM", default_kv_heads=2)
    num_experts = config.integer("num_experts", 512, highest=10_000)
    shared = config.integer("shared_expert_intermediate_size", 512)
    spec = read_experts(config, dense, num_experts, default_top_k=10, default_width=512, shared=shared)
    return spec, build_weights(spec, NAMES | SHARED, INPUTS, by_key_head=True)


def read_hybrid(config: ConfigReader, architecture: str, default_kv_heads: int) -> ModelSpec:
    """Read the layers, with dense feed-forward networks. The caller must call config.done()."""
    num_layers = config.layers("num_hidden_layers")
    kinds = read_kinds(config, num_layers)
    bias = config.flag("attention_bias", False)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6), float32_weight=True)
    if (rope := config.inner("rope_parameters")) is not None:
        rope.ignore("mrope_section", "mrope_interleaved")  # text has one position in every section
    spec = read_decoder(
        config,
        architecture,
        default_kv_heads=default_kv_heads,
        default_max_position=32768,
        default_head_dim=256,
        windows=[None] * num_layers,
        norm=norm,
        qkv_bias=bias,
        output_bias=bias,
        head_norm=True,
        partial_rotary=0.25,
    )
    spec = map_attention(spec, lambda index, attention: replace(attention, output_gate=True))
    heads = config.integer("linear_num_value_heads", 32)
    key_heads = config.integer("linear_num_key_heads", 16)
    if heads % key_heads:
        raise ModelError(f"config.json: {heads} value heads cannot share {key_heads} key heads evenly")
    mixer = GatedDeltaNetSpec(
        num_heads=heads,
        num_kv_heads=key_heads,
        key_dim=config.integer("linear_key_head_dim", 128),
        value_dim=config.integer("linear_value_head_dim", 128),
        conv_kernel=config.integer("linear_conv_kernel_dim", 4, lowest=2),
        norm_eps=norm.eps,
    )
    config.refuse("use_sliding_window")
    layers = zip(spec.layers, kinds, strict=True)
    return replace(
        spec,
        layers=tuple(
            replace(layer, attention=mixer) if kind == "linear_attention" else layer for layer, kind in layers
        ),
    )


def read_kinds(config: ConfigReader, num_layers: int) -> tuple[str, ...]:
    interval = config.integer("full_attention_interval", 4)
    kinds = config.names("layer_types") or tuple(
        "linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)
    )
    if len(kinds) != num_layers or set(kinds) != KINDS:
        raise ModelError(
            f"config.json: layer_types must name linear_attention or full_attention for each of the {num_layers} "
            f"layers, and both at least once, but it is {', '.join(kinds)}"
        )
    return kinds
