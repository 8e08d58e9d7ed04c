"""OLMo 2 and 3 (Olmo2ForCausalLM, Olmo3ForCausalLM): Llama with norms after attention and feed-forward, and norms over
the whole query and key projections. OLMo 3 has windows in most layers, whose rope is not scaled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention, read_decoder, read_local_windows
from serve_llm.engine.model.families.names import ATTENTION, GATED, weights
from serve_llm.engine.model.families.rope import read_rope
from serve_llm.engine.model.rope_spec import RopeSpec
from serve_llm.engine.model.spec import ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

OLMO3_BASE = 500_000.0


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Olmo2ForCausalLM. Defaults of absent keys are transformers' own (Olmo2Config)."""
    return _read(config, "Olmo2ForCausalLM", [None] * config.layers("num_hidden_layers"))


def read_olmo3(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Olmo3ForCausalLM. Defaults of absent keys are transformers' own (Olmo3Config)."""
    max_position = config.integer("max_position_embeddings", 2048)
    width = config.integer("hidden_size")
    head_dim = config.integer("head_dim", width // config.integer("num_attention_heads"))
    both = config.inner("rope_parameters")
    local, whole = (both and both.inner(f"{kind}_attention") for kind in ("sliding", "full"))
    base = config.number("rope_theta", OLMO3_BASE)
    if local is not None and both is not None:
        local.choice("rope_type", {"default": "default"}, "default")
        base = local.number("rope_theta", base)
        local.done()
        both.done()
    rope = read_rope(config, max_position, head_dim, default_base=OLMO3_BASE, scaling=whole)
    return _read(config, "Olmo3ForCausalLM", read_local_windows(config, 4), rope, RopeSpec(base))


def _read(
    config: ConfigReader,
    architecture: str,
    windows: Sequence[int | None],
    rope: tuple[RopeSpec, int] | None = None,
    local: RopeSpec | None = None,  # that layers with a window have
) -> tuple[ModelSpec, WeightMap]:
    bias = config.flag("attention_bias", False)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    plain = read_decoder(
        config,
        architecture,
        default_kv_heads=None,
        default_max_position=2048,
        norm_position="output",
        norm=norm,
        windows=windows,
        qkv_bias=bias,
        output_bias=bias,
        rope=rope,
    )
    spec = map_attention(
        plain,
        lambda index, attention: replace(
            attention, qk_projection_norm=norm, rope=local if local and attention.sliding_window else attention.rope
        ),
    )
    config.done()
    norms = {"post_attention_layernorm": "attention_norm", "post_feedforward_layernorm": "ffn_norm"}
    return spec, weights(spec, norms | ATTENTION | GATED)
