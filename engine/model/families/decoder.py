"""Decoders with rope, as in most families, and the keys that say which layers have a sliding window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.rope import DEFAULT_BASE, read_rope
from serve_llm.engine.model.rope_spec import RopeSpec
from serve_llm.engine.model.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormPosition, NormSpec


def read_decoder(
    config: ConfigReader,
    architecture: str,
    *,
    default_kv_heads: int | None,  # None: num_attention_heads
    default_max_position: int,
    default_rope_base: float = DEFAULT_BASE,
    default_tied: bool = False,
    windows: Sequence[int | None],  # one for each layer
    default_head_dim: int | None = None,  # None: hidden_size / heads
    norm_position: NormPosition = "pre",
    norm: NormSpec | None = None,  # None: rms, of rms_norm_eps
    ffn: MLPSpec | None = None,  # None: gated silu
    qkv_bias: bool = False,
    output_bias: bool = False,
    ffn_bias: bool = False,  # whether the default ffn has biases
    head_norm: bool = False,
    rope: tuple[RopeSpec, int] | None = None,  # None: by read_rope
    partial_rotary: float | None = None,  # see `read_rope`
    interleaved: bool = False,  # see `RopeSpec`
) -> ModelSpec:
    """Read a decoder with rope. The caller must call config.done()."""
    width = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    if config.is_null("num_key_value_heads"):
        default_kv_heads = None
    kv_heads = config.integer("num_key_value_heads", default_kv_heads or heads)
    head_dim = config.integer("head_dim", default_head_dim or width // heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    max_position = config.integer("max_position_embeddings", default_max_position)
    rotary, context = rope or read_rope(config, max_position, head_dim, partial_rotary, default_rope_base)
    norm = norm or NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    if ffn is None:
        config.choice("hidden_act", {"silu": "silu", "swish": "silu"}, "silu")
        ffn = MLPSpec(config.integer("intermediate_size"), "silu", gated=True, bias=ffn_bias)
    mixer = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=replace(rotary, interleaved=interleaved),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=norm if head_norm else None,
    )
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=width,
        max_position=context,
        layers=tuple(LayerSpec(replace(mixer, sliding_window=window), ffn, norm, norm_position) for window in windows),
        final_norm=norm,
        tie_word_embeddings=config.flag("tie_word_embeddings", default_tied),
    )


def map_attention(spec: ModelSpec, change: Callable[[int, AttentionSpec], AttentionSpec]) -> ModelSpec:
    """The model with each layer's attention replaced by `change(layer index, attention)`."""

    def changed(index: int, layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.attention, AttentionSpec)
        return replace(layer, attention=change(index, layer.attention))

    return replace(spec, layers=tuple(changed(index, layer) for index, layer in enumerate(spec.layers)))


def read_windows(config: ConfigReader) -> list[int | None]:
    """Each layer's sliding window by Qwen's keys: layers from max_window_layers on have one, or layer_types decides."""
    num_layers = config.layers("num_hidden_layers")
    sliding = config.flag("use_sliding_window", False)
    window = None if config.is_null("sliding_window") else config.integer("sliding_window", 4096, lowest=0) or None
    first = config.integer("max_window_layers", 28, lowest=0)
    slides = read_layer_kinds(config, num_layers)
    if slides is None:
        return [window if sliding and index >= first else None for index in range(num_layers)]
    if any(slides) and not (sliding and window):
        raise ModelError(
            "config.json: layer_types names sliding_attention, but use_sliding_window does not give a window"
        )
    return [window if slide else None for slide in slides]


def read_local_windows(config: ConfigReader, default_pattern: int, default_window: int = 4096) -> list[int | None]:
    """Each layer's sliding window by Gemma's keys: every sliding_window_pattern-th has none, or layer_types decides."""
    num_layers = config.layers("num_hidden_layers")
    window = config.integer("sliding_window", default_window)
    pattern = config.integer("sliding_window_pattern", default_pattern)
    config.ignore("_sliding_window_pattern")  # transformers also writes layer_types, which takes precedence
    slides = read_layer_kinds(config, num_layers) or [(index + 1) % pattern != 0 for index in range(num_layers)]
    if any(slides) and config.is_null("sliding_window"):
        raise ModelError("config.json: sliding_window is null, but some layers have a sliding window")
    return [window if slide else None for slide in slides]


def read_layer_kinds(config: ConfigReader, num_layers: int) -> list[bool] | None:
    """Which layers have a sliding window according to layer_types; None if the key is absent."""
    kinds = config.names("layer_types")
    if kinds is None:
        return None
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            "config.json: layer_types must name full_attention or sliding_attention for each of the "
            f"{num_layers} layers, but it is {', '.join(kinds)}"
        )
    return [kind == "sliding_attention" for kind in kinds]
