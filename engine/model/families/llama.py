"""Llama (LlamaForCausalLM), and what the families that descend from it share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.config import Config
from serve_llm.engine.model.families.rope import read_rope
from serve_llm.engine.model.spec import Attention, Dense, Layer, ModelSpec, Norm
from serve_llm.engine.model.weight_map import Row, WeightMap


def read(config: Config) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (LlamaConfig)."""
    bias = config.flag("attention_bias", False)
    spec = read_decoder(
        config,
        "LlamaForCausalLM",
        default_kv_heads=None,
        default_max_position=2048,
        windows=[None] * config.layers("num_hidden_layers"),
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=config.flag("mlp_bias", False),
    )
    config.ignore("max_sequence_length")  # of early conversions; transformers does not read it
    config.done()
    return spec, weights(spec)


def read_decoder(
    config: Config,
    architecture: str,
    *,
    default_kv_heads: int | None,  # None: as many as heads
    default_max_position: int,
    default_norm_eps: float = 1e-6,
    windows: Sequence[int | None],  # one for each layer
    default_head_dim: int | None = None,  # None: hidden_size / heads
    qkv_bias: bool = False,
    output_bias: bool = False,
    ffn_bias: bool = False,
    head_norm: bool = False,
) -> ModelSpec:
    """A decoder with rms norm before each half, rope, gated silu feed-forward. The caller ends with config.done()."""
    width = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    if config.is_null("num_key_value_heads"):
        default_kv_heads = None
    kv_heads = config.integer("num_key_value_heads", default_kv_heads or heads)
    head_dim = config.integer("head_dim", default_head_dim or width // heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads evenly")
    if head_dim % 2 or not head_dim:
        raise ModelError(f"config.json: rotary embedding needs an even head size, but it is {head_dim}")
    rope, context = read_rope(config, config.integer("max_position_embeddings", default_max_position))
    norm = Norm("rms", config.number("rms_norm_eps", default_norm_eps))
    config.choice("hidden_act", {"silu": "silu", "swish": "silu"}, "silu")
    ffn = Dense(config.integer("intermediate_size"), "silu", gated=True, bias=ffn_bias)

    def layer(window: int | None) -> Layer:
        mixer = Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=rope,
            window=window,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            head_norm_eps=norm.eps if head_norm else None,
        )
        return Layer(mixer, ffn, norm)

    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        width=width,
        max_position=context,
        layers=tuple(layer(window) for window in windows),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
    )


def read_windows(config: Config) -> list[int | None]:
    """Qwen's way to say which layers have a sliding window: all from max_window_layers on, or layer_types."""
    num_layers = config.layers("num_hidden_layers")
    sliding = config.flag("use_sliding_window", False)
    window = None if config.is_null("sliding_window") else config.integer("sliding_window", 4096)
    first = config.integer("max_window_layers", 28, lowest=0)
    kinds = config.names("layer_types")
    if kinds is None:
        return [window if sliding and index >= first else None for index in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            "config.json: layer_types must name full_attention or sliding_attention for each of the "
            f"{num_layers} layers, but it is {', '.join(kinds)}"
        )
    if "sliding_attention" in kinds and not (sliding and window):
        raise ModelError(
            "config.json: layer_types names sliding_attention, but use_sliding_window does not give a window"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


LLAMA_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def weights(spec: ModelSpec, norms: Mapping[str, str] = LLAMA_NORMS) -> WeightMap:
    """The names of LlamaForCausalLM and its descendants, for the parameters that the spec has.

    norms: parameter -> the name in a layer of the checkpoint.
    """
    mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn

    def linear(source: str, parameter: str, bias: bool) -> list[Row]:
        kinds = ("weight", "bias") if bias else ("weight",)
        return [Row(f"model.layers.{{layer}}.{source}.{k}", (f"layers.{{layer}}.{parameter}.{k}",)) for k in kinds]

    rows = [
        *(row for parameter, source in norms.items() for row in linear(source, parameter, False)),
        *linear("self_attn.q_proj", "attention.q", mixer.qkv_bias),
        *linear("self_attn.k_proj", "attention.k", mixer.qkv_bias),
        *linear("self_attn.v_proj", "attention.v", mixer.qkv_bias),
        *linear("self_attn.o_proj", "attention.output", mixer.output_bias),
        *linear("mlp.gate_proj", "ffn.gate", ffn.bias),
        *linear("mlp.up_proj", "ffn.up", ffn.bias),
        *linear("mlp.down_proj", "ffn.down", ffn.bias),
        Row("model.norm.weight", ("final_norm.weight",)),
    ]
    if mixer.head_norm_eps is not None or mixer.projection_norm_eps is not None:
        rows += linear("self_attn.q_norm", "attention.q_norm", False)
        rows += linear("self_attn.k_norm", "attention.k_norm", False)
    return WeightMap(
        rows=tuple(rows),
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
        prefix="model.",
        ignored=(r".*\.rotary_emb\.inv_freq",),  # computed from config.json
    )
