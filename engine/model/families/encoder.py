"""Encoders: every layer attends in both directions, and there is no LM head. What BERT and its descendants share."""

from __future__ import annotations

from collections.abc import Sequence

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.pooled import read_num_labels
from serve_llm.engine.model.rope_spec import RopeSpec
from serve_llm.engine.model.spec import (
    AttentionSpec,
    LayerSpec,
    LearnedPositions,
    MLPSpec,
    ModelSpec,
    NormPosition,
    NormSpec,
    PoolerLayer,
    PoolerSpec,
)


def read_heads(config: ConfigReader) -> tuple[int, int, int]:
    """Return hidden_size, num_attention_heads, and the size of a head."""
    width = config.integer("hidden_size")
    heads = config.integer("num_attention_heads")
    head_dim, rest = divmod(width, heads)
    if rest:
        raise ModelError(f"config.json: hidden_size {width} is not a multiple of num_attention_heads {heads}")
    return width, heads, head_dim


def read_classifier(config: ConfigReader, architecture: str) -> PoolerSpec | None:
    """BERT's classifier: a linear layer with tanh on the first token's hidden state, and one to the classes. A
    classifier of tokens has only the second one. None for architectures without a classifier."""
    if architecture.endswith("ForTokenClassification"):
        classes = PoolerLayer("classifier", read_num_labels(config))
        return PoolerSpec(("cls",), (classes,), is_classifier=True, classifies_tokens=True)
    if not architecture.endswith("ForSequenceClassification"):
        return None
    dense = PoolerLayer("dense", config.integer("hidden_size"), activation="tanh")
    layers = (dense, PoolerLayer("classifier", read_num_labels(config)))
    return PoolerSpec(("cls",), layers, is_classifier=True)


def build_encoder(
    config: ConfigReader,
    architecture: str,
    *,
    max_position: int,  # tokens
    ffn: MLPSpec,
    norm: NormSpec,
    ropes: Sequence[RopeSpec | None],  # one per layer
    windows: Sequence[int | None] = (),  # one per layer; empty: none
    bias: bool = True,  # whether the linear layers of attention have one
    norm_position: NormPosition = "post",
    positions: LearnedPositions | None = None,
    token_types: int = 0,
    pooler: PoolerSpec | None = None,
    alibi_slopes: tuple[float, ...] | None = None,
    qk_projection_norm: NormSpec | None = None,
) -> ModelSpec:
    """Read an encoder that uses BERT's names for sizes. The caller must call config.done()."""
    width, heads, head_dim = read_heads(config)

    def build_layer(index: int, rope: RopeSpec | None) -> LayerSpec:
        attention = AttentionSpec(
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=rope,
            sliding_window=windows[index] if windows else None,
            qkv_bias=bias,
            qk_projection_norm=qk_projection_norm,
            output_bias=bias,
            alibi_slopes=alibi_slopes,
            causal=False,
        )
        return LayerSpec(attention, ffn, norm, norm_position)

    config.ignore("hidden_dropout_prob", "attention_probs_dropout_prob", "tie_word_embeddings")
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=width,
        max_position=max_position,
        layers=tuple(build_layer(index, rope) for index, rope in enumerate(ropes)),
        final_norm=norm if norm_position == "pre" else None,
        tie_word_embeddings=True,
        learned_positions=positions,
        lm_head=False,
        pooler=pooler,
        token_types=token_types,
        embedding_norm=norm,
    )
