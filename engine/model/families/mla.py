"""Decoders with latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), and the names of its tensors."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.names import GATED, PRE_NORMS
from serve_llm.engine.model.families.rope import read_rope, score_factor
from serve_llm.engine.model.spec import LayerSpec, MLASpec, MLPSpec, ModelSpec, NormSpec

NORM_EPS = 1e-6  # RMS norms of latent vectors; not in config.json
NAMES = {
    **PRE_NORMS,
    **GATED,
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.kv_up",
    "self_attn.o_proj": "attention.output",
}
QUERIES = {"self_attn.q_proj": "attention.q"}
LATENT_QUERIES = {
    "self_attn.q_a_proj": "attention.q_down",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.q_up",
}


def read_mla_decoder(
    config: ConfigReader, architecture: str, *, default_max_position: int, interleaved: bool
) -> ModelSpec:
    """Read the model, dense in every layer. interleaved: as in `RopeSpec`. The caller must call config.done()."""
    mixer, context = _read_mixer(config, default_max_position, interleaved)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    config.choice("hidden_act", {"silu": "silu"}, "silu")
    config.refuse("mlp_bias")
    layer = LayerSpec(mixer, MLPSpec(config.integer("intermediate_size"), "silu", gated=True), norm)
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        max_position=context,
        layers=(layer,) * config.layers("num_hidden_layers"),
        final_norm=norm,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
    )


def _read_mixer(config: ConfigReader, default_max_position: int, interleaved: bool) -> tuple[MLASpec, int]:
    """Return the attention and the longest context in tokens."""
    rank = None if config.is_null("q_lora_rank") else config.integer("q_lora_rank", 1536)
    nope_dim = config.integer("qk_nope_head_dim", 128)
    rope_dim = config.integer("qk_rope_head_dim", 64)
    rope, context = read_rope(config, config.integer("max_position_embeddings", default_max_position), rope_dim)
    bias = config.flag("attention_bias", False)
    if bias and rank is None:
        raise ModelError("config.json: attention_bias without q_lora_rank is not supported")
    config.ignore("num_key_value_heads", "head_dim", "qk_head_dim")  # these have no meaning for latent attention
    mixer = MLASpec(
        num_heads=config.integer("num_attention_heads"),
        q_lora_rank=rank,
        kv_lora_rank=config.integer("kv_lora_rank", 512),
        qk_nope_head_dim=nope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=config.integer("v_head_dim", 128),
        scale=(nope_dim + rope_dim) ** -0.5 * score_factor(config, rope),
        norm_eps=NORM_EPS,
        rope=replace(rope, interleaved=interleaved),
        bias=bias,
    )
    return mixer, context


def mla_names(spec: ModelSpec) -> dict[str, str]:
    """The names for `weights`, for a model that `read_mla_decoder` has read."""
    mixer = spec.layers[0].attention
    assert isinstance(mixer, MLASpec)
    return NAMES | (QUERIES if mixer.q_lora_rank is None else LATENT_QUERIES)
