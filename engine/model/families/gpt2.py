"""GPT-2 (GPT2LMHeadModel): learned positions, layer norms, gelu; weights stored as (inputs, outputs), qkv as one."""

from __future__ import annotations

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.config import Config
from serve_llm.engine.model.spec import Activation, Attention, Dense, Layer, LearnedPositions, ModelSpec, Norm
from serve_llm.engine.model.weight_map import Row, Transform, WeightMap

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def read(config: Config) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (GPT2Config)."""
    width, heads = config.integer("n_embd"), config.integer("n_head")
    if width % heads:
        raise ModelError(f"config.json: n_embd {width} is not a multiple of n_head {heads}")
    head_dim = width // heads
    norm = Norm("layer", config.number("layer_norm_epsilon", 1e-5))
    activation = config.choice("activation_function", ACTIVATIONS, "gelu_new")
    ffn = Dense(config.integer("n_inner", 4 * width), activation, bias=True)
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)

    def layer(index: int) -> Layer:
        layer_scale = scale / (index + 1) if by_layer else scale
        return Layer(Attention(heads, heads, head_dim, layer_scale, qkv_bias=True, output_bias=True), ffn, norm)

    max_position = config.integer("n_positions", 1024)
    spec = ModelSpec(
        architecture="GPT2LMHeadModel",
        vocab_size=config.integer("vocab_size"),
        width=width,
        max_position=max_position,
        layers=tuple(layer(index) for index in range(config.layers("n_layer"))),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", True),
        positions=LearnedPositions(max_position),
    )
    config.ignore("n_ctx", "n_special", "predict_special_tokens", "output_past")  # of the first checkpoints; never read
    config.ignore("resid_pdrop", "embd_pdrop", "attn_pdrop")
    config.ignore("reorder_and_upcast_attn")  # the order of rounding in half precision; scores are float32 here
    config.ignore(*(f"summary_{key}" for key in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")))
    config.done()
    return spec, WEIGHTS


def _rows(source: str, *parameters: str, transform: Transform = "none") -> list[Row]:
    """Weight and bias of one part of a layer."""

    def row(kind: str, change: Transform) -> Row:
        filled = tuple(f"layers.{{layer}}.{parameter}.{kind}" for parameter in parameters)
        return Row(f"transformer.h.{{layer}}.{source}.{kind}", filled, change)

    return [row("weight", transform), row("bias", "none")]


WEIGHTS = WeightMap(
    rows=(
        Row("transformer.wpe.weight", ("positions.weight",)),
        *_rows("ln_1", "attention_norm"),
        *_rows("attn.c_attn", "attention.q", "attention.k", "attention.v", transform="transpose"),
        *_rows("attn.c_proj", "attention.output", transform="transpose"),
        *_rows("ln_2", "ffn_norm"),
        *_rows("mlp.c_fc", "ffn.up", transform="transpose"),
        *_rows("mlp.c_proj", "ffn.down", transform="transpose"),
        Row("transformer.ln_f.weight", ("final_norm.weight",)),
        Row("transformer.ln_f.bias", ("final_norm.bias",)),
    ),
    embedding="transformer.wte.weight",
    head="lm_head.weight",
    prefix="transformer.",
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),  # the causal mask, stored by old versions
)
