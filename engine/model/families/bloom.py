"""BLOOM (BloomForCausalLM): ALiBi positions, a norm on the embedding, layer norms, joint qkv weights."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.alibi import MAX_HEADS, compute_slopes
from serve_llm.engine.model.families.falcon import NAMES, OUTSIDE
from serve_llm.engine.model.families.gpt_neox import FFN
from serve_llm.engine.model.families.names import PRE_NORMS, weights
from serve_llm.engine.model.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

DEFAULT_CONTEXT = 2048  # BLOOM's training length in tokens; transformers writes no seq_length


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (BloomConfig), except that the sizes must be there."""
    width = config.integer(_choose_key(config, "hidden_size", "n_embed"))
    heads = config.integer(_choose_key(config, "n_head", "num_attention_heads"), highest=MAX_HEADS)
    if width % heads:
        raise ModelError(f"config.json: hidden_size {width} is not a multiple of n_head {heads}")
    config.refuse("apply_residual_connection_post_layernorm")
    config.only("n_inner", None, 4 * width)
    norm = NormSpec("layer", config.number("layer_norm_epsilon", 1e-5))
    head_dim = width // heads
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=True,
        output_bias=True,
        alibi_slopes=compute_slopes(heads),
    )
    layer = LayerSpec(attention, MLPSpec(4 * width, "gelu_tanh", bias=True), norm)
    spec = ModelSpec(
        architecture="BloomForCausalLM",
        vocab_size=config.integer("vocab_size"),
        hidden_size=width,
        max_position=config.integer("seq_length", DEFAULT_CONTEXT),
        layers=(layer,) * config.layers(_choose_key(config, "n_layer", "num_hidden_layers")),
        final_norm=norm,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        embedding_norm=norm,
    )
    # how it was trained, and the order of rounding in half precision
    config.ignore("slow_but_exact", "attention_softmax_in_fp32", "masked_softmax_fusion", "bias_dropout_fusion")
    config.ignore("skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "n_positions")
    config.done()
    weight_map = weights(spec, PRE_NORMS | NAMES | FFN, OUTSIDE, qkv_groups=heads)
    embedding_norm = [
        WeightRule(f"transformer.word_embeddings_layernorm.{kind}", (f"embedding_norm.{kind}",))
        for kind in ("weight", "bias")
    ]
    return spec, replace(weight_map, rules=(*weight_map.rules, *embedding_norm))


def _choose_key(config: ConfigReader, key: str, other: str) -> str:
    """`key`, which transformers writes, or `other`, which some published files have instead."""
    if other not in config.keys:
        return key
    if key in config.keys and config.integer(key) != config.integer(other):
        raise ModelError(f"config.json: {key} and {other} contradict each other")
    return other
