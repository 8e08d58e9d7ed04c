"""MPT (MptForCausalLM, or MPTForCausalLM as MosaicML publishes it): ALiBi positions, layer norms without biases,
joint qkv weights, and clipped queries, keys and values."""

from __future__ import annotations

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.alibi import MAX_HEADS, compute_slopes
from serve_llm.engine.model.families.names import QKV, Names, weights
from serve_llm.engine.model.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

NAMES = {
    "norm_1": "attention_norm",
    "attn.Wqkv": QKV,
    "attn.out_proj": "attention.output",
    "norm_2": "ffn_norm",
    "ffn.up_proj": "ffn.up",
    "ffn.down_proj": "ffn.down",
}
OUTSIDE = Names("transformer.", "transformer.blocks", "transformer.wte", "transformer.norm_f")


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (MptConfig), except that the sizes must be there.

    transformers does not read expansion_ratio and alibi_bias_max; MosaicML's code does, and so does this function.
    """
    width = config.integer("d_model")
    heads = config.integer("n_heads", highest=MAX_HEADS)
    if width % heads:
        raise ModelError(f"config.json: d_model {width} is not a multiple of n_heads {heads}")
    config.only("no_bias", True, None)
    config.only("norm_type", "low_precision_layernorm", "layernorm", None)
    config.empty("logit_scale", "fc_type", "ffn_config")
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5), bias=False)
    attention = _read_attention(config.inner("attn_config") or ConfigReader({}), heads, width // heads)
    layer = LayerSpec(attention, MLPSpec(width * config.integer("expansion_ratio", 4), "gelu"), norm)
    spec = ModelSpec(
        architecture="MptForCausalLM",
        vocab_size=config.integer("vocab_size"),
        hidden_size=width,
        max_position=config.integer("max_seq_len", 2048),
        layers=(layer,) * config.layers("n_layers"),
        final_norm=norm,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )
    config.ignore("learned_pos_emb")  # only without ALiBi
    config.ignore("embedding_fraction", "init_config", "init_device", "verbose")  # for training
    config.done()
    return spec, weights(spec, NAMES, OUTSIDE)


def _read_attention(config: ConfigReader, heads: int, head_dim: int) -> AttentionSpec:
    config.only("alibi", True, None)
    config.only("attn_type", "multihead_attention", None)
    config.refuse("prefix_lm", "qk_ln", "attn_uses_sequence_id")
    clip = config.number("clip_qkv", 0.0)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=config.number("softmax_scale", head_dim**-0.5),
        alibi_slopes=compute_slopes(heads, config.number("alibi_bias_max", 8.0)),
        qkv_clip=clip or None,
    )
    config.ignore("attn_impl")
    config.done()
    return attention
