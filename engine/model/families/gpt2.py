"""GPT-2 (GPT2LMHeadModel): learned positions, layer norms, gelu; weights stored as (inputs, outputs), qkv as one."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention
from serve_llm.engine.model.spec import (
    Activation,
    AttentionSpec,
    LayerSpec,
    LearnedPositions,
    MLPSpec,
    ModelSpec,
    NormPosition,
    NormSpec,
)
from serve_llm.engine.model.weight_map import Transform, WeightMap, WeightRule

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (GPT2Config)."""
    plain = read_plain(config, "GPT2LMHeadModel", default_max_position=1024, default_tied=True, attention_bias=True)
    unscaled = not config.flag("scale_attn_weights", True)
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)

    def scaled(index: int, attention: AttentionSpec) -> AttentionSpec:
        scale = 1.0 if unscaled else attention.scale
        return replace(attention, scale=scale / (index + 1) if by_layer else scale)

    spec = replace(map_attention(plain, scaled), learned_positions=LearnedPositions(plain.max_position))
    config.ignore("n_ctx", "n_special", "predict_special_tokens", "output_past")  # never read
    config.ignore("n_vocab", "line_by_line", "apply_query_key_layer_scaling", "normalize_attention_scores")  # nor these
    config.ignore("reorder_and_upcast_attn")  # the order of rounding in half precision; scores are float32 here
    config.done()
    return spec, WEIGHTS


def read_plain(
    config: ConfigReader,
    architecture: str,
    *,
    default_max_position: int,
    default_tied: bool,
    attention_bias: bool = False,
    norm_position: NormPosition = "pre",
) -> ModelSpec:
    """Read a decoder with GPT-2's keys, without positions. The caller must call config.done()."""
    width = config.integer("n_embd")
    heads = config.integer("n_head")
    if width % heads:
        raise ModelError(f"config.json: n_embd {width} is not a multiple of n_head {heads}")
    head_dim = width // heads
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5))
    activation = config.choice("activation_function", ACTIVATIONS, "gelu_new")
    ffn = MLPSpec(config.integer("n_inner", 4 * width), activation, bias=True)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
    )
    config.ignore("resid_pdrop", "embd_pdrop", "attn_pdrop")
    config.ignore(*(f"summary_{key}" for key in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")))
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=width,
        max_position=config.integer("n_positions", default_max_position),
        layers=(LayerSpec(attention, ffn, norm, norm_position),) * config.layers("n_layer"),
        final_norm=norm,
        tie_word_embeddings=config.flag("tie_word_embeddings", default_tied),
    )


def _rows(source: str, *parameters: str, transform: Transform = "none") -> list[WeightRule]:
    """Weight and bias of one part of a layer."""

    def row(kind: str, change: Transform) -> WeightRule:
        filled = tuple(f"layers.{{layer}}.{parameter}.{kind}" for parameter in parameters)
        return WeightRule(f"transformer.h.{{layer}}.{source}.{kind}", filled, change)

    return [row("weight", transform), row("bias", "none")]


WEIGHTS = WeightMap(
    rules=(
        WeightRule("transformer.wpe.weight", ("positions.weight",)),
        *_rows("ln_1", "attention_norm"),
        *_rows("attn.c_attn", "attention.q", "attention.k", "attention.v", transform="transpose"),
        *_rows("attn.c_proj", "attention.output", transform="transpose"),
        *_rows("ln_2", "ffn_norm"),
        *_rows("mlp.c_fc", "ffn.up", transform="transpose"),
        *_rows("mlp.c_proj", "ffn.down", transform="transpose"),
        WeightRule("transformer.ln_f.weight", ("final_norm.weight",)),
        WeightRule("transformer.ln_f.bias", ("final_norm.bias",)),
    ),
    embedding="transformer.wte.weight",
    head="lm_head.weight",
    prefix="transformer.",
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask, stored by old versions
)
