"""Decoders with rope, which most families are, and how their files say which layers have a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.config import Config
from serve_llm.engine.model.families.rope import DEFAULT_BASE, read_rope
from serve_llm.engine.model.spec import Attention, Dense, Layer, ModelSpec, Norm, Placement, Rope


def read_decoder(
    config: Config,
    architecture: str,
    *,
    default_kv_heads: int | None,  # None: as many as heads
    default_max_position: int,
    default_rope_base: float = DEFAULT_BASE,
    default_tied: bool = False,
    windows: Sequence[int | None],  # one for each layer
    default_head_dim: int | None = None,  # None: hidden_size / heads
    placement: Placement = "pre",
    norm: Norm | None = None,  # None: rms, of rms_norm_eps
    ffn: Dense | None = None,  # None: gated silu
    qkv_bias: bool = False,
    output_bias: bool = False,
    ffn_bias: bool = False,  # of the gated one
    head_norm: bool = False,
    rope: tuple[Rope, int] | None = None,  # None: by read_rope
    partial_rotary: float | None = None,  # as of read_rope
    interleaved: bool = False,  # as of spec.Rope
) -> ModelSpec:
    """A decoder with rope. The caller ends with config.done()."""
    width = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    if config.is_null("num_key_value_heads"):
        default_kv_heads = None
    kv_heads = config.integer("num_key_value_heads", default_kv_heads or heads)
    head_dim = config.integer("head_dim", default_head_dim or width // heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    max_position = config.integer("max_position_embeddings", default_max_position)
    turned, context = rope or read_rope(config, max_position, head_dim, partial_rotary, default_rope_base)
    norm = norm or Norm("rms", config.number("rms_norm_eps", 1e-6))
    if ffn is None:
        config.choice("hidden_act", {"silu": "silu", "swish": "silu"}, "silu")
        ffn = Dense(config.integer("intermediate_size"), "silu", gated=True, bias=ffn_bias)
    mixer = Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=replace(turned, interleaved=interleaved),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        head_norm=norm if head_norm else None,
    )
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        width=width,
        max_position=context,
        layers=tuple(Layer(replace(mixer, window=window), ffn, norm, placement) for window in windows),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", default_tied),
    )


def read_windows(config: Config) -> list[int | None]:
    """Qwen's way to say which layers have a sliding window: all from max_window_layers on, or layer_types."""
    num_layers = config.layers("num_hidden_layers")
    sliding = config.flag("use_sliding_window", False)
    window = None if config.is_null("sliding_window") else config.integer("sliding_window", 4096, lowest=0) or None
    first = config.integer("max_window_layers", 28, lowest=0)
    slides = _slides(config, num_layers)
    if slides is None:
        return [window if sliding and index >= first else None for index in range(num_layers)]
    if any(slides) and not (sliding and window):
        raise ModelError(
            "config.json: layer_types names sliding_attention, but use_sliding_window does not give a window"
        )
    return [window if slide else None for slide in slides]


def read_local_windows(config: Config, default_pattern: int, default_window: int = 4096) -> list[int | None]:
    """Gemma's way to say it: all but each sliding_window_pattern-th, or layer_types."""
    num_layers = config.layers("num_hidden_layers")
    window = config.integer("sliding_window", default_window)
    pattern = config.integer("sliding_window_pattern", default_pattern)
    config.ignore("_sliding_window_pattern")  # transformers writes it beside layer_types, which says more
    slides = _slides(config, num_layers) or [(index + 1) % pattern != 0 for index in range(num_layers)]
    if any(slides) and config.is_null("sliding_window"):
        raise ModelError("config.json: sliding_window is null, but some layers have a sliding window")
    return [window if slide else None for slide in slides]


def _slides(config: Config, num_layers: int) -> list[bool] | None:
    """Which layers have a window by layer_types, if it is there."""
    kinds = config.names("layer_types")
    if kinds is None:
        return None
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            "config.json: layer_types must name full_attention or sliding_attention for each of the "
            f"{num_layers} layers, but it is {', '.join(kinds)}"
        )
    return [kind == "sliding_attention" for kind in kinds]
