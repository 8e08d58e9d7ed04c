"""Falcon (FalconForCausalLM) with rope: parallel attention and feed-forward, joint qkv weights, multi-query or
grouped-query attention."""

from __future__ import annotations

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.gpt2 import ACTIVATIONS
from serve_llm.engine.model.families.gpt_neox import FFN
from serve_llm.engine.model.families.names import PRE_NORMS, QKV, Names, weights
from serve_llm.engine.model.spec import MLPSpec, ModelSpec, NormPosition, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

NAMES = {"self_attention.query_key_value": QKV, "self_attention.dense": "attention.output"}
NORMS: dict[NormPosition, dict[str, str]] = {
    "pre": PRE_NORMS,
    "parallel": {"input_layernorm": "attention_norm"},
    "parallel_two_norms": {"ln_attn": "attention_norm", "ln_mlp": "ffn_norm"},
}
OUTSIDE = Names("transformer.", "transformer.h", "transformer.word_embeddings", "transformer.ln_f")


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (FalconConfig)."""
    config.refuse("alibi")  # Falcon-RW encodes positions as a bias on the scores
    config.refuse("apply_residual_connection_post_layernorm")
    bias = config.flag("bias", False)
    width = config.integer("hidden_size")
    activation = config.choice("activation", ACTIVATIONS, "gelu")
    kv_heads, norm_position = _layout(config)
    spec = read_decoder(
        config,
        "FalconForCausalLM",
        default_kv_heads=kv_heads,
        default_max_position=2048,
        default_tied=True,
        windows=[None] * config.layers("num_hidden_layers"),
        norm=NormSpec("layer", config.number("layer_norm_epsilon", 1e-5)),
        ffn=MLPSpec(config.integer("ffn_hidden_size", 4 * width), activation, bias=bias),
        qkv_bias=bias,
        output_bias=bias,
        norm_position=norm_position,
    )
    config.ignore("hidden_dropout", "ff_factor")
    config.done()
    return spec, weights(spec, NORMS[norm_position] | NAMES | FFN, OUTSIDE, qkv_groups=kv_heads)


def _layout(config: ConfigReader) -> tuple[int, NormPosition]:
    """The number of key and value heads and the placement of the norms, from three generations of keys."""
    heads = config.integer("num_attention_heads")
    new = config.flag("new_decoder_architecture", False)
    multi_query = config.flag("multi_query", True)
    parallel = config.flag("parallel_attn", True)
    kv_heads = config.integer("num_kv_heads", heads)
    norms = config.integer("num_ln_in_parallel_attn", 2 if new else 1, highest=2)
    if (new and not parallel) or (norms == 2 and not new):
        raise ModelError(
            "config.json: new_decoder_architecture, parallel_attn and num_ln_in_parallel_attn do not go together"
        )
    if new:
        return kv_heads, "parallel_two_norms" if norms == 2 else "parallel"
    if not multi_query and kv_heads != heads:
        raise ModelError(f"config.json: num_kv_heads {kv_heads} needs multi_query or new_decoder_architecture")
    return 1 if multi_query else heads, "parallel" if parallel else "pre"
