"""Gemma 2 and 3 (Gemma2ForCausalLM, Gemma3ForCausalLM): norms before and after attention and feed-forward, whose
weights are stored minus 1 and kept in float32, gelu gates, and windows in most layers. Gemma 2 caps scores and logits;
Gemma 3 norms each head and uses a different rope in layers with windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention, read_decoder, read_local_windows
from serve_llm.engine.model.families.names import ATTENTION, GATED, weights
from serve_llm.engine.model.families.rope import DEFAULT_BASE, read_rope
from serve_llm.engine.model.rope_spec import RopeSpec
from serve_llm.engine.model.spec import Activation, MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

ACTIVATIONS: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh"}
NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
    **ATTENTION,
    **GATED,
}


def read_gemma2(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Gemma2ForCausalLM. Defaults of absent keys are transformers' own (Gemma2Config)."""
    spec = _read(config, "Gemma2ForCausalLM", read_local_windows(config, 2), default_max_position=8192)
    softcap = _softcap(config, "attn_logit_softcapping", 50.0)
    spec = map_attention(spec, lambda index, attention: replace(attention, softcap=softcap))
    spec = replace(spec, logits_softcap=_softcap(config, "final_logit_softcapping", 30.0))
    config.ignore("sliding_window_size")  # in published files; transformers does not read it
    config.done()
    return spec, weights(spec, NAMES, norms="plus_one")


def read_gemma3(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Gemma3ForCausalLM. Defaults of absent keys are transformers' own (Gemma3TextConfig)."""
    windows = read_local_windows(config, 6)
    max_position = config.integer("max_position_embeddings", 131072)  # including what rope scaling makes usable
    local, whole = _ropes(config, max_position)
    spec = _read(
        config,
        "Gemma3ForCausalLM",
        windows,
        default_max_position=max_position,
        rope=(whole, max_position),
        head_norm=True,
    )
    spec = map_attention(
        spec, lambda index, attention: replace(attention, rope=local) if attention.sliding_window else attention
    )
    spec = replace(spec, logits_softcap=_softcap(config, "final_logit_softcapping", None))
    if _softcap(config, "attn_logit_softcapping", None):  # transformers knows the key but does not use it
        raise ModelError("config.json: attn_logit_softcapping is not served in Gemma 3")
    config.done()
    return spec, weights(spec, NAMES, norms="plus_one")


def _read(
    config: ConfigReader,
    architecture: str,
    windows: Sequence[int | None],
    default_max_position: int,
    rope: tuple[RopeSpec, int] | None = None,
    head_norm: bool = False,
) -> ModelSpec:
    config.refuse("use_bidirectional_attention")
    config.ignore("hidden_act")  # replaced by hidden_activation
    bias = config.flag("attention_bias", False)
    activation = config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    spec = read_decoder(
        config,
        architecture,
        default_kv_heads=4,
        default_max_position=default_max_position,
        default_head_dim=256,
        default_tied=True,
        windows=windows,
        norm_position="sandwich",
        norm=NormSpec("rms", config.number("rms_norm_eps", 1e-6), float32_weight=True),
        ffn=MLPSpec(config.integer("intermediate_size"), activation, gated=True),
        qkv_bias=bias,
        output_bias=bias,
        head_norm=head_norm,
        rope=rope,
    )
    scale = config.number("query_pre_attn_scalar", 256.0) ** -0.5
    spec = map_attention(spec, lambda index, attention: replace(attention, scale=scale))
    return replace(spec, embedding_multiplier=spec.hidden_size**0.5, rounds_embedding_multiplier=True)


def _softcap(config: ConfigReader, key: str, default: float | None) -> float | None:
    """null in the file means none."""
    return None if config.is_null(key) else config.number(key, default or 0.0) or None


def _ropes(config: ConfigReader, max_position: int) -> tuple[RopeSpec, RopeSpec]:
    """The rope of layers with a sliding window, and that of the others."""
    head_dim = config.integer("head_dim", 256)
    both = config.inner("rope_parameters")
    local, whole = (both and both.inner(f"{kind}_attention") for kind in ("sliding", "full"))
    if both is not None:
        both.done()
    base = config.number("rope_local_base_freq", DEFAULT_BASE)
    if local is not None:
        local.choice("rope_type", {"default": "default"}, "default")
        base = local.number("rope_theta", base)
        local.done()
    return RopeSpec(base), read_rope(config, max_position, head_dim, default_base=1_000_000.0, scaling=whole)[0]
