"""OPT (OPTForCausalLM): learned positions from row 2 on, layer norms before or after, relu, narrow embeddings."""

from __future__ import annotations

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.gpt2 import ACTIVATIONS
from serve_llm.engine.model.spec import AttentionSpec, LayerSpec, LearnedPositions, MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

POSITION_OFFSET = 2  # rows before position 0


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (OPTConfig)."""
    width = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    if width % heads:
        raise ModelError(f"config.json: hidden_size {width} is not a multiple of num_attention_heads {heads}")
    head_dim = width // heads
    bias = config.flag("enable_bias", True)
    norm = NormSpec("layer", 1e-5, affine=config.flag("layer_norm_elementwise_affine", True))
    before = config.flag("do_layer_norm_before", True)
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv_bias=bias,
            output_bias=bias,
        ),
        ffn=MLPSpec(config.integer("ffn_dim"), config.choice("activation_function", ACTIVATIONS, "relu"), bias=bias),
        norm=norm,
        norm_position="pre" if before else "post",
    )
    max_position = config.integer("max_position_embeddings", 2048)
    embedding_width = config.integer("word_embed_proj_dim", width)
    removed = config.flag("_remove_final_layer_norm", False)
    spec = ModelSpec(
        architecture="OPTForCausalLM",
        vocab_size=config.integer("vocab_size"),
        hidden_size=width,
        max_position=max_position,
        layers=(layer,) * config.layers("num_hidden_layers"),
        final_norm=norm if before and not removed else None,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        learned_positions=LearnedPositions(max_position + POSITION_OFFSET, POSITION_OFFSET),
        embedding_size=None if embedding_width == width else embedding_width,
    )
    config.ignore("dropout", "layerdrop", "init_std", "activation_dropout")
    config.only("learned_embeddings", True, None)  # this and the next key are in Galactica's files
    config.only("scale_embeddings", False, None)
    config.done()
    return spec, _weights(spec, bias)


def _weights(spec: ModelSpec, linear_bias: bool) -> WeightMap:
    layer = spec.layers[0]
    base = "model.decoder."

    def rows(source: str, parameter: str, *kinds: str) -> list[WeightRule]:
        return [WeightRule(f"{base}{source}.{kind}", (f"{parameter}.{kind}",)) for kind in kinds]

    def inside(source: str, parameter: str, kinds: tuple[str, ...]) -> list[WeightRule]:
        return rows(f"layers.{{layer}}.{source}", f"layers.{{layer}}.{parameter}", *kinds)

    linear = ("weight", "bias") if linear_bias else ("weight",)
    norm = ("weight", "bias") if layer.norm.affine else ()
    rules = [
        *rows("embed_positions", "positions", "weight"),
        *inside("self_attn_layer_norm", "attention_norm", norm),
        *inside("self_attn.q_proj", "attention.q", linear),
        *inside("self_attn.k_proj", "attention.k", linear),
        *inside("self_attn.v_proj", "attention.v", linear),
        *inside("self_attn.out_proj", "attention.output", linear),
        *inside("final_layer_norm", "ffn_norm", norm),
        *inside("fc1", "ffn.up", linear),
        *inside("fc2", "ffn.down", linear),
    ]
    if spec.final_norm is not None:
        rules += rows("final_layer_norm", "final_norm", *norm)
    if spec.embedding_size is not None:
        rules += rows("project_in", "project_in", "weight")
        rules += rows("project_out", "project_out", "weight")
    return WeightMap(tuple(rules), embedding=f"{base}embed_tokens.weight", head="lm_head.weight", prefix="model.")
