"""Llama (LlamaForCausalLM), and what the families that descend from it share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.config import Config
from serve_llm.engine.model.families.rope import DEFAULT_BASE, read_rope
from serve_llm.engine.model.spec import MLA, Attention, Dense, Layer, Mixer, ModelSpec, MoE, Norm, Placement, Rope
from serve_llm.engine.model.weight_map import Row, Transform, WeightMap


def read(config: Config) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (LlamaConfig)."""
    spec = read_plain(config, "LlamaForCausalLM")
    config.ignore("max_sequence_length")  # of early conversions; transformers does not read it
    config.done()
    return spec, weights(spec)


def read_plain(config: Config, architecture: str) -> ModelSpec:
    """A decoder with Llama's keys and defaults. The caller ends with config.done()."""
    bias = config.flag("attention_bias", False)
    return read_decoder(
        config,
        architecture,
        default_kv_heads=None,
        default_max_position=2048,
        windows=[None] * config.layers("num_hidden_layers"),
        qkv_bias=bias,
        output_bias=bias,
        ffn_bias=config.flag("mlp_bias", False),
    )


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


PRE_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
ATTENTION = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.output",
}
JOINT_GATED = {"mlp.gate_up_proj": "ffn.gate ffn.up", "mlp.down_proj": "ffn.down"}
GATED = {"mlp.gate_proj": "ffn.gate", "mlp.up_proj": "ffn.up", "mlp.down_proj": "ffn.down"}
QKV = "attention.q attention.k attention.v"
MOE = ("ffn.router", "ffn.experts.", "ffn.shared")  # parameters of layers with experts
QK_NORMS = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
HEAD_NORMS = {source: f"{parameter}.{{member}}" for source, parameter in QK_NORMS.items()}  # all of a layer in a stack


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls modules outside its layers, and the list of these."""

    prefix: str = "model."
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"


LLAMA = Names()


def weights(
    spec: ModelSpec,
    names: Mapping[str, str] = PRE_NORMS | ATTENTION | GATED,
    outside: Names = LLAMA,
    norms: Transform = "none",
    qkv_groups: int = 1,
) -> WeightMap:
    """The names of LlamaForCausalLM and its descendants, and for each whether the spec has weight and bias or one.

    names: in a layer of the checkpoint -> the parameters that this fills, with spaces between. norms: how the weights
    of all norms are stored. qkv_groups: in a joint weight, of query heads with the key and value head that they read.
    """
    layer = spec.layers[0]
    mixer = layer.mixer
    sizes = {}
    members = _members(spec)
    if isinstance(mixer, Attention):
        if mixer.projection_norm_eps is not None or (mixer.head_norm is not None and mixer.head_norm.kind == "rms"):
            names = {**names, **QK_NORMS}
        sizes = {"attention.q": mixer.heads * mixer.head_dim}
        sizes |= dict.fromkeys(("attention.k", "attention.v"), mixer.kv_heads * mixer.head_dim)
    dense = [one.ffn for one in spec.layers if isinstance(one.ffn, Dense)]
    biased = _biased(mixer)
    biased |= dict.fromkeys(("ffn.gate", "ffn.up", "ffn.down"), any(ffn.bias for ffn in dense))
    biased |= dict.fromkeys(("attention_norm", "ffn_norm"), layer.norm.has_bias)

    def rows(source: str, filled: str) -> list[Row]:
        parameters = filled.split()
        kind_of = MoE if parameters[0].startswith(MOE) else Dense if parameters[0].startswith("ffn.") else Dense | MoE
        layers = tuple(index for index, one in enumerate(spec.layers) if isinstance(one.ffn, kind_of))
        return [
            Row(
                f"{outside.layers}.{{layer}}.{source}.{kind}",
                tuple(f"layers.{{layer}}.{parameter}.{kind}" for parameter in parameters),
                norms if kind == "weight" and parameters[0].endswith("norm") else "none",
                tuple(sizes[parameter] for parameter in parameters if len(parameters) > 1 and parameter in sizes),
                qkv_groups if filled == QKV else 1,
                layers=layers if len(layers) < len(spec.layers) else None,
                members=members.get(parameters[0].partition(".{member}")[0], 0) if "{member}" in filled else 0,
            )
            for kind in (("weight", "bias") if biased.get(parameters[0]) else ("weight",))
        ]

    inside = [row for source, filled in names.items() for row in rows(source, filled)]
    kinds = ("weight", "bias") if layer.norm.has_bias else ("weight",)
    ends = [
        Row(f"{outside.final_norm}.{kind}", (f"final_norm.{kind}",), norms if kind == "weight" else "none")
        for kind in kinds
    ]
    if spec.head_bias:
        ends.append(Row(f"{outside.head}.bias", ("head.bias",)))
    return WeightMap(
        rows=(*inside, *ends),
        embedding=f"{outside.embedding}.weight",
        head=f"{outside.head}.weight",
        prefix=outside.prefix,
        # computed from config.json, and the causal mask, stored by old versions
        ignored=(r".*\.rotary_emb\.inv_freq", r".*\.(attn|attention)\.(bias|masked_bias)"),
    )


def _members(spec: ModelSpec) -> dict[str, int]:
    """How many experts or heads there are, by what stands before `{member}` in parameters."""
    mixer = spec.layers[0].mixer
    experts = [layer.ffn.router.num_experts for layer in spec.layers if isinstance(layer.ffn, MoE)]
    counts = {"attention.q_norm": mixer.heads, "attention.k_norm": mixer.kv_heads}
    return {**counts, "ffn.experts": max(experts, default=0)}


def _biased(mixer: Mixer) -> dict[str, bool]:
    """Which of its products have a bias."""
    if isinstance(mixer, MLA):
        return dict.fromkeys(("attention.q_down", "attention.kv_down", "attention.output"), mixer.bias)
    return dict.fromkeys(("attention.q", "attention.k", "attention.v"), mixer.qkv_bias) | {
        "attention.output": mixer.output_bias
    }
