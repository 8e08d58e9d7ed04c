"""SmolLM3 (SmolLM3ForCausalLM): Llama without rope in every fourth layer (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention, read_decoder
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (SmolLM3Config). Windows are not served; no published
    model has them."""
    bias = config.flag("attention_bias", False)
    num_layers = config.layers("num_hidden_layers")
    plain = read_decoder(
        config,
        "SmolLM3ForCausalLM",
        default_kv_heads=4,
        default_max_position=32768,
        default_rope_base=2_000_000.0,
        default_tied=True,
        windows=[None] * num_layers,
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=config.flag("mlp_bias", False),
    )
    config.refuse("use_sliding_window")
    if "sliding_attention" in (config.names("layer_types") or ()):
        raise ModelError("config.json: layer_types: sliding windows of SmolLM3 are not served")
    config.ignore("sliding_window", "max_window_layers")
    has_rope = read_rope_layers(config, num_layers)
    spec = map_attention(
        plain, lambda index, attention: attention if has_rope[index] else replace(attention, rope=None)
    )
    config.done()
    return spec, weights(spec)


def read_rope_layers(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """1 for each layer with rope, 0 for each without. no_rope_layers in config.json uses this encoding in spite of its
    name."""
    interval = config.integer("no_rope_layer_interval", 4)
    has_rope = config.integers("no_rope_layers", highest=1)
    if not has_rope:
        return tuple(int((index + 1) % interval != 0) for index in range(num_layers))
    if len(has_rope) < num_layers:
        raise ModelError(f"config.json: no_rope_layers has {len(has_rope)} entries for {num_layers} layers")
    return has_rope[:num_layers]
